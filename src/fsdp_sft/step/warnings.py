"""One warning each of what is probably a mistake in a step, but may be meant."""

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fsdp_sft._compat.fsdp import compute_dtypes
from fsdp_sft._model.twin import keep_config
from fsdp_sft._model.view import base_of, unwrapped
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft.dcp_io.model_state import loaded_step
from fsdp_sft.errors import abridged
from fsdp_sft.sac import draws_random_numbers
from fsdp_sft.step.checks import first_time
from fsdp_sft.step.update import stepped_by

# Where train_step has left each of torch's schedules; looked up, and forgotten, in the next step.
_stepped_at: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()


def warn_of_likely_mistakes(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    scaler: torch.amp.GradScaler | None,
    left_out: list[str],
) -> None:
    """Warn, on rank 0, of what makes a training wrong or useless, unless it is meant.

    Args:
        model: Model that is to be trained.
        optimizers: Those that step it.
        schedulers: Those of their learning rates.
        scaler: Scaler of the loss; None without one.
        left_out: Names of parameters that require gradients and are in no optimizer.
    """
    if this_rank() != 0:
        return
    if not model.training and first_time(model, "eval()") and draws_random_numbers(model):
        warn_caller(
            "the model is in eval() mode, in which it is trained without its dropout: call model.train() "
            "after what has put it there"
        )
    if scaler is None and first_time(model, "float16") and torch.float16 in compute_dtypes(model):
        warn_caller(
            "the model computes in float16 without a scaler: gradients below 6e-8 become 0. Pass "
            "scaler=torch.amp.GradScaler(), or compute in bfloat16, which needs none"
        )
    # Optimizers of other libraries may round stochastically, which cannot be seen from outside.
    for one in (each for each in optimizers if type(each).__module__.startswith("torch.optim.")):
        kind = type(one).__name__
        narrow = [p for p in stepped_by(one) if p.requires_grad and p.dtype is torch.bfloat16]
        if narrow and first_time(model, f"bfloat16 by {kind}"):
            warn_caller(
                f"{len(narrow)} trained parameters are bfloat16, and {kind} rounds them to the nearest: an "
                "update below 1/512 of a value is lost, as most are in fine-tuning. Use "
                "fsdp_sft.StochasticAdamW, or float32 masters (master_dtype=torch.float32)"
            )
    if first_time(model, "config"):
        keep_config(base_of(unwrapped(model)))
    if left_out and first_time(model, "left out"):
        warn_caller(
            f"{len(left_out)} parameters that require gradients are in no optimizer ({abridged(left_out)}): "
            "they stay as they are, and their gradients cost memory and count in the norm that is clipped. "
            "Give them to the optimizer, or freeze them with requires_grad_(False)"
        )
    _warn_of_schedules(model, schedulers)
    step = loaded_step(model, with_optimizer=False)
    if step is not None and not any(one.state for one in optimizers) and first_time(model, f"step {step}"):
        warn_caller(
            f"the model was loaded from step {step} without the optimizer that was saved with it, and is "
            "trained on with one that begins anew. To continue that run, pass load_checkpoint(..., "
            "optimizer=optimizer)"
        )


def note_stepped(scheduler: Any) -> None:
    """Remember that ``train_step`` has stepped a schedule; of another kind than torch's nothing is known."""
    if isinstance(scheduler, LRScheduler):
        _stepped_at[scheduler] = scheduler.last_epoch


def _warn_of_schedules(model: nn.Module, schedulers: Sequence[Any]) -> None:
    """Warn of schedules that are stepped twice, or were made anew beside an optimizer that was loaded."""
    of_torch = [one for one in schedulers if isinstance(one, LRScheduler)]
    twice = [one for one in of_torch if _stepped_at.pop(one, None) == one.last_epoch - 1]
    if twice and first_time(model, "stepped twice"):
        warn_caller(
            f"the {type(twice[0]).__name__} was stepped once since the last train_step, which had stepped it "
            "too, so that the learning rate runs through its schedule twice as fast: leave out "
            "scheduler.step(), or scheduler= of train_step"
        )
    apart = [one for one in schedulers if getattr(one, "last_epoch", 0) and _sets_other_rates(one)]
    if apart and first_time(model, "other rates"):
        warn_caller(
            f"the learning rates are {[group['lr'] for group in apart[0].optimizer.param_groups]}, and "
            f"{type(apart[0]).__name__} stands at {apart[0].get_last_lr()}: a schedule that is made after "
            "load_checkpoint sets its first rates again. Make it before load_checkpoint, and call its "
            "load_state_dict after it"
        )
    resumed = loaded_step(model, with_optimizer=True)
    behind = [one for one in schedulers if getattr(one, "last_epoch", None) == 0]
    if resumed and behind and first_time(model, f"scheduler {resumed}"):
        warn_caller(
            f"the optimizer goes on from step {resumed} and its {type(behind[0]).__name__} begins at 0, so "
            "that its warm-up comes again: save its state_dict() in train_state, and load_state_dict() it "
            "from load_checkpoint(...).train_state, unless a new schedule is meant"
        )


def _sets_other_rates(scheduler: Any) -> bool:
    """Whether a schedule's last rates are not those of its optimizer, as far as both are on the host."""
    last: list[Any] = getattr(scheduler, "get_last_lr", list)()
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    pairs = [(rate, group["lr"]) for rate, group in zip(last, groups, strict=False)]
    on_host = [pair for pair in pairs if all(getattr(rate, "is_cpu", True) for rate in pair)]
    return any(not math.isclose(a, b, rel_tol=1e-6) for a, b in on_host)

"""Checks of a step before its first forward, which ``check=False`` leaves out.

Five mistakes would train something else in silence: labels that are shifted already, the same rows on ranks
that should have others (or other rows on ranks that share them), ids that a model has no row for, nothing
that is trained, and a trained parameter outside the shards. Labels and rows are looked at in a model's first
window, the rest in each.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from fsdp_sft._compat.attention import attention_of
from fsdp_sft._compat.fsdp import compute_dtypes
from fsdp_sft._model.forward import check_ids, check_labels
from fsdp_sft._model.published import refuse_merged
from fsdp_sft._model.sharded import refuse_changed_gradients
from fsdp_sft._model.twin import keep_config, text_config
from fsdp_sft._model.view import base_of, record_of, replicated_by, unwrapped
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._ranks.agree import this_rank, world_size
from fsdp_sft._ranks.init import env_int
from fsdp_sft.collate.packs import refuse_masked_pack
from fsdp_sft.dcp_io.model_state import loaded_step
from fsdp_sft.errors import BatchError, OptimizerError, UnsupportedModelError, abridged
from fsdp_sft.loss import LABEL_KEYS, is_shifted
from fsdp_sft.loss.part import rows_of
from fsdp_sft.sac import draws_random_numbers
from fsdp_sft.sampling.verify import unverified_pack
from fsdp_sft.step.update import stepped_by
from fsdp_sft.targets import IGNORE_INDEX

FIRST_WINDOW = "its first window was looked at"
_FEWEST = 16  # fewest targets for which a mistake in labels is reported
_VARIED = 8  # fewest different ids among them
_SHARE = 0.99  # share of the targets that must show the mistake
_OFF = "; check=False if that is meant"

_logger = logging.getLogger("fsdp_sft.step")
# Where train_step has left each of torch's schedules; looked up, and forgotten, in the next step.
_stepped_at: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()


class _Done(set[Any]):
    """What was checked, or warned of, once for a model."""


def done_with(model: nn.Module) -> set[Any]:
    """What was checked, or warned of, once for a model; to be added to."""
    return record_of(model).kept_or_new(_Done)


def first_time(model: nn.Module, thing: str) -> bool:
    """Whether this is the first call with this model and ``thing``."""
    done = done_with(model)
    is_first = thing not in done
    done.add(thing)
    return is_first


def refuse_beside(
    names: dict[nn.Parameter, str], optimizers: list[torch.optim.Optimizer], mesh: DeviceMesh | None
) -> None:
    """Refuse to step tensors that have got a gradient and are no parameters of the model.

    Raises:
        OptimizerError: If an optimizer holds one.
    """
    beside = [p for p in stepped_by(*optimizers) if p.grad is not None and p not in names]
    if beside and mesh is not None and mesh.size() > 1:
        raise OptimizerError(
            f"the optimizer steps {len(beside)} tensors (the first of shape {tuple(beside[0].shape)}) that "
            "are none of the model's parameters: no reduction over the ranks reaches them, and each rank "
            "would train its own. Register them in the model before it is sharded"
        )


def refuse_untrainable(
    model: nn.Module,
    names: dict[nn.Parameter, str],
    optimizers: list[torch.optim.Optimizer],
    mesh: DeviceMesh | None,
) -> None:
    """Refuse a model of which nothing would be trained, or something by each rank for itself.

    Args:
        model: Model, whose parameters are not gathered.
        names: Its parameters with their names.
        optimizers: Those that step them.
        mesh: Ranks that share the window.

    Raises:
        OptimizerError: If nothing is trained.
        RuntimeError: If gradients are off.
        UnsupportedModelError: If adapters are merged into it, or gradients of what is trained would not be
            reduced over the ranks, or not as they have to be.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "gradients are off here (torch.no_grad, torch.inference_mode or set_grad_enabled(False)), and a "
            "step needs them: call train_step outside of that block"
        )
    stepped = [parameter for parameter in stepped_by(*optimizers) if parameter.requires_grad]
    if not stepped:
        whose = "of the optimizer " if any(parameter.requires_grad for parameter in names) else ""
        raise OptimizerError(
            f"no parameter {whose}is trained, so that a step would change nothing: make the optimizer "
            "of those that require a gradient (adapters go in before that, and before sharding)"
        )
    refuse_merged(model, "training")
    if mesh is None:
        ranks = world_size() if dist.is_initialized() else env_int("WORLD_SIZE", 1)
        if ranks > 1:
            raise UnsupportedModelError(
                f"{type(unwrapped(model)).__name__} is neither sharded nor inside DistributedDataParallel, "
                f"and each of {ranks} processes would train its own: call init_distributed() first, "
                "and shard_model(model, mesh=build_mesh()) before the optimizer is made. Processes that are "
                "meant to be apart have no WORLD_SIZE in their environment"
            )
        return
    refuse_changed_gradients(model, mesh)
    if mesh.size() == 1:
        return
    whole = [n for p, n in names.items() if p.requires_grad and not isinstance(p, DTensor)]
    if whole and replicated_by(model) is None:
        raise UnsupportedModelError(
            f"{len(whole)} trained parameters are not sharded ({abridged(whole)}): no reduction over the "
            "ranks reaches them, and each rank would train its own. Add them before shard_model (adapters by "
            "add_adapters, or load_pretrained(peft_config=)), or freeze them with requires_grad_(False)"
        )


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
    if isinstance(scheduler, LRScheduler) and hasattr(scheduler, "last_epoch"):  # a chain has none
        _stepped_at[scheduler] = scheduler.last_epoch


def _warn_of_schedules(model: nn.Module, schedulers: Sequence[Any]) -> None:
    """Warn of schedules that are stepped twice, or were made anew beside an optimizer that was loaded."""
    of_torch = [one for one in schedulers if isinstance(one, LRScheduler) and hasattr(one, "last_epoch")]
    twice = [one for one in of_torch if _stepped_at.pop(one, None) == one.last_epoch - 1]
    if twice and first_time(model, "stepped twice"):
        warn_caller(
            f"the {type(twice[0]).__name__} was stepped once since the last train_step, which had stepped it "
            "too, so that the learning rate runs through its schedule twice as fast: leave out "
            "scheduler.step(), or scheduler= of train_step"
        )
    resumed = loaded_step(model, with_optimizer=True)
    # Of a chain of schedules the last has the rates.
    last = {id(getattr(one, "optimizer", one)): one for one in schedulers}.values()
    apart = [one for one in last if getattr(one, "last_epoch", 0) and _sets_other_rates(one)]
    if apart and resumed is not None and first_time(model, "other rates"):
        warn_caller(
            f"the learning rates are {[group['lr'] for group in apart[0].optimizer.param_groups]}, and "
            f"{type(apart[0]).__name__} stands at {apart[0].get_last_lr()}: a schedule that is made after "
            "load_checkpoint sets its first rates again. Make it before load_checkpoint, and call its "
            "load_state_dict after it"
        )
    behind = [one for one in schedulers if getattr(one, "last_epoch", None) == 0]
    if resumed and behind and first_time(model, f"scheduler {resumed}"):
        warn_caller(
            f"the optimizer goes on from step {resumed} and its {type(behind[0]).__name__} begins at 0, so "
            "that its warm-up comes again: save its state_dict() in train_state, and load_state_dict() it "
            "from load_checkpoint(...).train_state, unless a new schedule is meant"
        )


def _sets_other_rates(scheduler: Any) -> bool:
    """Whether a schedule's last rates are not those of its optimizer, as far as both are on the host.

    Bases and rates that were changed alike, by hand, belong together.
    """
    last: list[Any] = getattr(scheduler, "get_last_lr", list)()
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    bases = getattr(scheduler, "base_lrs", last)
    known = [
        (rate, group["lr"], base, group.get("initial_lr", base))
        for rate, group, base in zip(last, groups, bases, strict=False)
    ]
    return any(
        all(getattr(number, "is_cpu", True) for number in numbers)
        and not math.isclose(*numbers[:2], rel_tol=1e-6)
        and not math.isclose(numbers[0] * numbers[2], numbers[1] * numbers[3], rel_tol=1e-6)
        for numbers in known
    )


def check_batches(model: nn.Module, batches: list[Any], *, own_loss: bool) -> int:
    """Raise for batches on the host that the model cannot take; return their ``unverified_pack``.

    With an ``own_loss`` labels are not checked, because they mean what the caller wants; nor are positions,
    unless the attention is transformers'.
    """
    most = getattr(text_config(model), "max_position_embeddings", None)
    knows_packs = not own_loss or attention_of(unwrapped(model)) != "its own"
    for batch in batches:
        ids: Any = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, torch.Tensor) and (ids.is_floating_point() or ids.dtype == torch.bool):
            raise BatchError(  # the embedding's error would be of this rank alone
                f"input_ids are {ids.dtype}, and ids are integers: make them torch.long (vectors go into "
                "inputs_embeds, with an attention_mask)"
            )
        if isinstance(batch, Mapping):
            check_ids(model, batch)
            positions: Any = batch.get("position_ids")
            packed = isinstance(positions, torch.Tensor) and positions.numel()
            length = int(positions.max()) + 1 if packed else getattr(ids, "shape", (0,))[-1]
            if isinstance(most, int) and 0 < most < length and _has_table_of(model, most):
                raise BatchError(  # the table's error would be of this rank alone, and an assertion on a GPU
                    f"a row has {length:,} tokens, and {type(unwrapped(model)).__name__.removeprefix('FSDP')}"
                    f" has a table of {most:,} positions: pass max_length= where rows are encoded"
                )
            if isinstance(most, int) and 0 < most < length and first_time(model, "length"):
                warn_caller(
                    f"a row has {length:,} tokens and {type(unwrapped(model)).__name__.removeprefix('FSDP')} "
                    f"was made for {most:,} (max_position_embeddings): positions beyond that were never "
                    "trained. Pass max_length= where rows are encoded, or load the model with a larger "
                    "max_position_embeddings= and rope_parameters= that extend it (yarn)"
                )
            if knows_packs and positions is not None:
                refuse_masked_pack(batch)
            if not own_loss:
                check_labels(model, batch, LABEL_KEYS, IGNORE_INDEX)
    # Attention of rows that ranks share is the library's own, and needs no proof; their limits it shares.
    return unverified_pack(model, batches) * (rows_of(model).ranks == 1) if knows_packs else 0


def _has_table_of(model: nn.Module, most: int) -> bool:
    """Whether a model learns an embedding of each position, as GPT-2 and OPT do (which has two more)."""
    tables = {m for m in unwrapped(model).modules() if isinstance(m, nn.Embedding)}
    return any(
        most <= table.num_embeddings <= most + 2
        for table in tables - {getattr(unwrapped(model), "get_input_embeddings", lambda: None)()}
    )


def look_at_labels(micro_batches: list[Any]) -> None:
    """Refuse a window of this rank whose labels show a recognised mistake; warn of trained padding.

    Recognised are labels that have been shifted already, and ``shift_labels`` that have not been shifted. A
    shift is reported only from 16 targets on, if at least 8 of them are different ids; places where an id
    equals the next one show nothing and do not count.

    Raises:
        BatchError: If there is such a mistake.
    """
    batches = [
        b for b in micro_batches if isinstance(b, Mapping) and isinstance(b.get("input_ids"), torch.Tensor)
    ]
    for name in LABEL_KEYS:
        _refuse_shift([one for one in batches if is_shifted(one) == (name == "shift_labels")], name)
    padding = sum(
        int(((batch["labels"] != IGNORE_INDEX) & (batch["attention_mask"] == 0)).sum())
        for batch in batches
        if not is_shifted(batch)
        and isinstance(batch.get("attention_mask"), torch.Tensor)
        and batch["attention_mask"].shape == batch["labels"].shape
    )
    if padding and this_rank() == 0:
        _logger.warning(
            "%d labels are of padding (attention_mask 0), which the model would learn to write: set them to "
            "-100, as SFTCollator does",
            padding,
        )


def _refuse_shift(batches: list[Any], name: str) -> None:
    """Refuse ``labels`` that equal the next ids, or ``shift_labels`` that equal the ids at their places."""
    telling, mistaken = 0, [torch.empty(0, dtype=torch.int64)]
    for batch in batches:
        own, following = batch["input_ids"][:, :-1], batch["input_ids"][:, 1:]
        labels = batch[name][:, :-1]
        tells = (labels != IGNORE_INDEX) & (own != following)
        telling += int(tells.sum())
        mistaken.append(labels[tells & (labels == (following if name == "labels" else own))])
    values = torch.cat(mistaken)
    if telling < _FEWEST or len(values) <= _SHARE * telling or len(values.unique()) < _VARIED:
        return
    said = (
        "labels equal the next id at {} of {} targets: they have been shifted already and the loss shifts "
        "them itself. Give labels aligned with input_ids, or what you have as shift_labels"
        if name == "labels"
        else "shift_labels equal the id at their own place at {} of {} targets: they have not been shifted. "
        "Give them as labels, which the loss shifts"
    )
    raise BatchError(said.format(len(values), telling) + _OFF)

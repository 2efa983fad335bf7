"""Checks of an optimizer after its first step: state that no checkpoint could hold, and lost updates."""

import weakref
from typing import Any

import torch

from fsdp_sft._process.callers import warn_caller
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft.dcp_io.inner_tensors import take_apart
from fsdp_sft.dcp_io.optimizer_content import check_storable
from fsdp_sft.errors import UnstorableStateError

_seen: "weakref.WeakSet[Any]" = weakref.WeakSet()
_told: "weakref.WeakSet[Any]" = weakref.WeakSet()  # an optimizer without state would never enter _seen


def state_problem(optimizer: Any) -> UnstorableStateError | None:
    """Why no checkpoint could hold the state of an optimizer's first step; None if one could, or later.

    Only tensor subclasses that do not expose their inner tensors are a problem, because they could not even
    be copied. Other state that ``save_checkpoint`` would refuse causes a warning, and so do bfloat16
    parameters that one of torch's optimizers rounds to the nearest; each is given once.
    """
    together = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers = [one for one in together if one not in _seen]
    try:
        for one in optimizers:
            _look_at(one)
            _warn_about(one, together)
            _warn_of_lost_updates(one)
    except UnstorableStateError as error:
        return error
    _seen.update(one for one in optimizers if one.state)
    return None


def _look_at(optimizer: torch.optim.Optimizer) -> None:
    """Raise for a tensor of the state that cannot be split into plain tensors."""
    for state in optimizer.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                take_apart(f"the state {name!r} of {type(optimizer).__name__}", value)


def _warn_about(optimizer: torch.optim.Optimizer, together: list[torch.optim.Optimizer]) -> None:
    """Warn if ``save_checkpoint`` would refuse the optimizer."""
    try:
        check_storable(optimizer, together)
    except UnstorableStateError as error:
        if this_rank() == 0:
            warn_caller(f"save_checkpoint will refuse this optimizer: {error}")


def _warn_of_lost_updates(optimizer: torch.optim.Optimizer) -> None:
    """Warn if one of torch's optimizers trains bfloat16 parameters, whose small updates it rounds away.

    Optimizers of other libraries may round stochastically, which cannot be seen from outside.
    """
    if optimizer in _told:
        return
    _told.add(optimizer)
    kind = type(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    narrow = [p for p in parameters if p.dtype is torch.bfloat16]
    if narrow and kind.__module__.startswith("torch.optim.") and this_rank() == 0:
        warn_caller(
            f"{len(narrow)} of {len(parameters)} trained parameters are bfloat16, and {kind.__name__} rounds "
            "them to the nearest: an update below 1/512 of a value is lost, as most are in fine-tuning. Use "
            "fsdp_sft.StochasticAdamW, or float32 masters (master_dtype=torch.float32)"
        )

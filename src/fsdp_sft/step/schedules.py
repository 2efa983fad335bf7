"""Check that a schedule is stepped by ``train_step`` or by its caller, and not by both."""

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from fsdp_sft._model.record import record_of
from fsdp_sft.errors import OptimizerError

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


@dataclass
class _Stepped:
    """Where the schedules stood when ``train_step`` had stepped them."""

    at: list[tuple["weakref.ref[Any]", int]] = field(default_factory=list)


def step_schedulers(model: nn.Module, schedulers: "list[LRScheduler]") -> None:
    """Step the schedules, and remember where they stand."""
    for each in schedulers:
        each.step()
    stands = [(weakref.ref(each), getattr(each, "last_epoch", None)) for each in schedulers]
    record_of(model).kept_or_new(_Stepped).at = [(ref, at) for ref, at in stands if isinstance(at, int)]


def forget_stepped(model: nn.Module) -> None:
    """Forget where the schedules stood: after a skipped step the caller may step them."""
    record_of(model).kept_or_new(_Stepped).at = []


def refuse_stepped_twice(model: nn.Module, schedulers: "list[LRScheduler]") -> None:
    """Refuse a schedule that has gone one step further since ``train_step`` stepped it.

    Loading a state moves it by another number of steps.

    Raises:
        OptimizerError: If there is one.
    """
    for ref, at in record_of(model).kept_or_new(_Stepped).at:
        one = ref()
        if one is not None and any(one is each for each in schedulers) and one.last_epoch == at + 1:
            forget_stepped(model)
            raise OptimizerError(
                f"{type(one).__name__} was stepped once since the last train_step, which steps it itself: "
                "its rates would change twice as fast. Leave scheduler.step() out of the loop, or scheduler= "
                "out of train_step"
            )

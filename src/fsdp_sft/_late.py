"""The last step of each model while the host has not read its numbers: ``train_step(..., sync="late")``."""

import weakref
from typing import Protocol

from torch import nn

from fsdp_sft._wrappers import unwrapped


class Unread(Protocol):
    """A step whose numbers are still being copied to the host."""

    def check(self) -> None:
        """Wait for the numbers and raise if the gradient was not finite."""


_unread: "weakref.WeakKeyDictionary[nn.Module, Unread]" = weakref.WeakKeyDictionary()


def keep(model: nn.Module, step: Unread) -> None:
    """Remember ``step`` as the last one of ``model``, in place of the one before."""
    _unread[unwrapped(model)] = step


def taken(model: nn.Module) -> Unread | None:
    """Return the last step of ``model`` and forget it; None if its numbers have been read."""
    return _unread.pop(unwrapped(model), None)


def settle(model: nn.Module) -> None:
    """Check that the last step of ``model`` was taken, before the model is saved, exported or evaluated.

    The step's numbers stay for the next ``train_step``.

    Raises:
        NonFiniteGradientError: If the optimizers left the step out. All ranks raise it, and the step is
            forgotten.
    """
    step = _unread.get(unwrapped(model))
    if step is not None:
        try:
            step.check()
        except BaseException:
            taken(model)
            raise

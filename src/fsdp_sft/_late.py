"""A model's last step, while the host has not read its numbers: ``train_step(..., sync="late")``."""

import weakref
from typing import Protocol

from torch import nn

from fsdp_sft._wrappers import unwrapped


class Unread(Protocol):
    """A step whose numbers are on their way to the host."""

    def check(self) -> None:
        """Wait for the numbers; raises if the gradient was not finite."""


_unread: "weakref.WeakKeyDictionary[nn.Module, Unread]" = weakref.WeakKeyDictionary()


def keep(model: nn.Module, step: Unread) -> None:
    """Remember the last step of ``model``, in the place of the one before."""
    _unread[unwrapped(model)] = step


def taken(model: nn.Module) -> Unread | None:
    """The last step of ``model``, which is forgotten; None if its numbers have been read."""
    return _unread.pop(unwrapped(model), None)


def settle(model: nn.Module) -> None:
    """Before the model is saved, exported or evaluated: see that its last step was taken.

    The step's numbers stay for the next ``train_step``.

    Raises:
        NonFiniteGradientError: If it was not, on all ranks; it is forgotten then.
    """
    step = _unread.get(unwrapped(model))
    if step is not None:
        try:
            step.check()
        except BaseException:
            taken(model)
            raise

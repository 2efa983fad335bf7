"""What is checked, or warned of, once for each model."""

from typing import Any

from torch import nn

from fsdp_sft._model.record import record_of


class _Done(set[Any]):
    """What was done for a model."""


def done_with(model: nn.Module) -> set[Any]:
    """What was done for a model, to be added to."""
    return record_of(model).kept_or_new(_Done)


def first_time(model: nn.Module, thing: str) -> bool:
    """Whether this is the first call with this model and ``thing``."""
    done = done_with(model)
    if thing in done:
        return False
    done.add(thing)
    return True

"""The record of the step that a model was loaded from, with or without the optimizer saved with it."""

from dataclasses import dataclass

from torch import nn

from fsdp_sft._model.record import kept_of, record_of


@dataclass
class _Loaded:
    """Number of the step, and whether its optimizer was loaded too; None if none was saved."""

    step: int
    with_optimizer: bool | None


def note_optimizer(model: nn.Module, step: int, *, loaded: bool | None) -> None:
    """Record whether a step was loaded with its optimizer; ``loaded`` is None if it has none."""
    record_of(model).keep(_Loaded(step, loaded))


def loaded_without_optimizer(model: nn.Module) -> int | None:
    """Number of the step that a model was loaded from without its optimizer; None if there is none."""
    known = kept_of(model, _Loaded)
    return known.step if known is not None and known.with_optimizer is False else None


def resumed_with_optimizer(model: nn.Module) -> int | None:
    """Number of the step that a model was loaded from with its optimizer; None if there is none."""
    known = kept_of(model, _Loaded)
    return known.step if known is not None and known.with_optimizer else None

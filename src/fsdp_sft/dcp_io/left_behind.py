"""The record of a step whose model was loaded without the optimizer that was saved with it."""

from dataclasses import dataclass

from torch import nn

from fsdp_sft._model.record import kept_of, record_of


@dataclass
class _LeftBehind:
    """Number of the step; None if the optimizer was loaded too, or none was saved."""

    step: int | None


def note_optimizer(model: nn.Module, step: int, *, left_behind: bool) -> None:
    """Record whether a step was loaded without its optimizer."""
    record_of(model).keep(_LeftBehind(step if left_behind else None))


def loaded_without_optimizer(model: nn.Module) -> int | None:
    """Number of the step that a model was loaded from without its optimizer; None if there is none."""
    known = kept_of(model, _LeftBehind)
    return None if known is None else known.step

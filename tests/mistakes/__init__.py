"""The mistakes, by what they are made in."""

from tests.mistakes import (
    checkpoints,
    data,
    devices,
    labels,
    loading,
    machines,
    meshes,
    own_losses,
    packs,
    planning,
    programs,
    quantised,
    steps,
    told,
    vision,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
    *labels.MISTAKES,
    *packs.MISTAKES,
    *loading.MISTAKES,
    *steps.MISTAKES,
    *own_losses.MISTAKES,
    *told.MISTAKES,
    *meshes.MISTAKES,
    *checkpoints.MISTAKES,
    *devices.MISTAKES,
    *data.MISTAKES,
    *planning.MISTAKES,
    *quantised.MISTAKES,
    *vision.MISTAKES,
    *machines.MISTAKES,
    *programs.MISTAKES,
]
__all__ = ["MISTAKES", "Mistake"]

"""The mistakes, by what they are made in."""

from benchmarks.checks.mistakes import (
    checkpoints,
    data,
    devices,
    labels,
    loading,
    meshes,
    planning,
    rows,
    steps,
    told,
)
from benchmarks.checks.mistakes.mistake import Mistake

MISTAKES = [
    *labels.MISTAKES,
    *rows.MISTAKES,
    *loading.MISTAKES,
    *steps.MISTAKES,
    *told.MISTAKES,
    *meshes.MISTAKES,
    *checkpoints.MISTAKES,
    *devices.MISTAKES,
    *data.MISTAKES,
    *planning.MISTAKES,
]
__all__ = ["MISTAKES", "Mistake"]

"""Mistakes in the step, the losses that a model adds, and several optimizers."""

from benchmarks.checks.mistakes.mistake import Mistake

MISTAKES: list[Mistake] = []

"""Mistakes in saving, resuming and exporting."""

from benchmarks.checks.mistakes.mistake import Mistake

MISTAKES: list[Mistake] = []

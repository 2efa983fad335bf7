"""Mistakes in loading, sharding, finding blocks and activation checkpointing."""

from benchmarks.checks.mistakes.mistake import Mistake

MISTAKES: list[Mistake] = []

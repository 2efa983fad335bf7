"""Mistakes with wrapped models, packs that nobody verified, and several meshes."""

from benchmarks.checks.mistakes.mistake import Mistake

MISTAKES: list[Mistake] = []

"""Mistakes in the step, the losses that a model adds, and several optimizers."""

from benchmarks.checks.mistakes.mistake import Mistake

MISTAKES: list[Mistake] = [
    Mistake(
        "the keys of batches not compared between ranks",
        "step/window.py",
        "compared = to_compare([len(keys), *digest(keys)])",
        "compared = to_compare([len(keys), *digest(len(keys))])",
        ("tests/step/test_keys.py",),
    ),
    Mistake(
        "a rank that has run out stands in with what it had last",
        "step/rounds.py",
        "if not are_equal(everyone, ranks):",
        "if not are_equal(everyone, ranks) and not stand_ins:",
        ("tests/step/test_keys.py",),
    ),
]

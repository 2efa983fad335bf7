"""Mistakes in packs, and in attention by rows."""

from benchmarks.checks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "a packed row predicts the first token of the next",
        "sampling/packing/collator.py",
        "labels.extend([IGNORE_INDEX, *chat.labels[1:]])",
        "labels.extend(chat.labels)",
        ("tests/sampling/packing/test_packs.py",),
    ),
    Mistake(
        "positions that run on over packed rows",
        "sampling/packing/collator.py",
        "torch.cat([torch.arange(length) for length in [*lengths, filler]])",
        "torch.arange(total + filler)",
        ("tests/sampling/packing/test_packs.py",),
    ),
    Mistake(
        "rows read off a mask that is not by rows",
        "attention/varlen/attention.py",
        "if not bool(told):",
        "if False:",
        ("tests/attention/varlen/test_varlen.py",),
    ),
    Mistake(
        "attention over the rows of a pack",
        "attention/varlen/attention.py",
        "bounds = [*edges.nonzero().squeeze(1).tolist(), begins.numel()]",
        "bounds = [0, begins.numel()]",
        ("tests/attention/varlen/test_varlen.py",),
    ),
    Mistake(
        "a sliding window forgotten, row by row",
        "attention/varlen/attention.py",
        "if length > rows.sliding_window:",
        "if False:",
        ("tests/attention/varlen/test_varlen.py",),
    ),
    Mistake(
        "a sliding window of one key more, in the kernel",
        "attention/varlen/attention.py",
        "rows.sliding_window - 1, 0)",
        "rows.sliding_window, 0)",
        ("tests/attention/varlen/test_varlen.py",),
    ),
]

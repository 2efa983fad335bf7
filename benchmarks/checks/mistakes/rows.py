"""Mistakes in packs, and in attention by rows."""

from benchmarks.checks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "a packed row predicts the first token of the next",
        "packing/collator.py",
        "labels += [IGNORE_INDEX, *row_labels[1:]]",
        "labels += row_labels",
        ("tests/packing/test_packs.py",),
    ),
    Mistake(
        "positions that run on over packed rows",
        "packing/collator.py",
        "position_ids += range(len(ids))",
        "position_ids += range(len(position_ids), len(position_ids) + len(ids))",
        ("tests/packing/test_packs.py",),
    ),
    Mistake(
        "rows read off a mask that is not by rows",
        "varlen/rows.py",
        "if not bool(torch.stack(exact).all()):",
        "if False:",
        ("tests/varlen/test_varlen.py",),
    ),
    Mistake(
        "attention over the rows of a pack",
        "varlen/rows.py",
        "bounds = [*begins.flatten().nonzero().squeeze(1).tolist(), begins.numel()]",
        "bounds = [0, begins.numel()]",
        ("tests/varlen/test_varlen.py",),
    ),
    Mistake(
        "a sliding window forgotten, row by row",
        "varlen/attention.py",
        "if length > rows.window:",
        "if False:",
        ("tests/varlen/test_varlen.py",),
    ),
    Mistake(
        "a sliding window of one key more, in the kernel",
        "varlen/attention.py",
        "rows.window - 1, 0)",
        "rows.window, 0)",
        ("tests/varlen/test_varlen.py",),
    ),
]

"""Mistakes in saving, resuming and exporting."""

from benchmarks.checks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "old steps deleted unasked",
        "dcp_io/checkpoint.py",
        "keep_last: int | None = None,",
        "keep_last: int | None = 2,",
        ("tests/dcp_io/test_retention.py",),
    ),
    Mistake(
        "an export into a folder that has filled fails",
        "export/target.py",
        "if error.errno in _TAKEN and os.path.lexists(place):",
        "if False:",
        ("tests/export/test_target.py",),
    ),
    Mistake(
        "generation does not stop where an answer was taught to end",
        "export/chat.py",
        "return known if stop in ids else [stop, *ids]",
        "return known",
        ("tests/export/test_chat.py",),
    ),
]

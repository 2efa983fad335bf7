"""What a run of trials prints."""

import collections
from collections.abc import Iterable


def table(head: list[str], lines: Iterable[Iterable[object]]) -> str:
    """A markdown table."""
    rows = [head, ["---"] * len(head), *([str(cell) for cell in line] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def counted(found: collections.Counter) -> str:
    """``3 this, 2 that``."""
    return ", ".join(f"{number} {name}" for name, number in found.most_common())

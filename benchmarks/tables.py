"""What benchmarks print, and write to a file that the results are committed as."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table; a short row is filled up with empty cells."""
    filled = ([*row, *[""] * (len(head) - len(row))] for row in rows)
    return [_line(head), "|" + "---|" * len(head), *map(_line, filled)]


def publish(title: str, lines: Sequence[str], output: Path | None) -> None:
    """Print the lines; with ``output`` write them there, below a title."""
    print("\n".join(lines), flush=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(f"# {title}\n\n" + "\n".join(lines) + "\n")


def median_and_range(values: Sequence[float], digits: int = 2) -> str:
    """``2.10 (2.00 to 2.40)``."""
    shown = [f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def quartiles(values: Sequence[float], digits: int = 2) -> str:
    """``2.00 to 2.40``: the values at a quarter from either end."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    return f"{low:.{digits}f} to {high:.{digits}f}"


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"

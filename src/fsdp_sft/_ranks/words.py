"""Ranks in words."""

from collections.abc import Iterable


def said_ranks(ranks: Iterable[int]) -> str:
    """Ranks in short: ``"rank 3"``, ``"ranks 0-2, 5"``."""
    runs: list[list[int]] = []
    known = sorted(ranks)
    for rank in known:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' * (len(known) > 1)} " + ", ".join("-".join(map(str, run)) for run in runs)

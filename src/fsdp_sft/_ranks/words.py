"""Ranks in words, and back."""

import re
from collections.abc import Iterable

from fsdp_sft.errors import abridged

_MOST = 32  # ranks, or runs of them, that are named


def said_ranks(ranks: Iterable[int]) -> str:
    """Ranks in short: ``"rank 3"``, ``"ranks 0-2, 5"``; of very many separate ones the first."""
    runs: list[list[int]] = []
    known = sorted(ranks)
    for rank in known:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    listed = abridged(("-".join(map(str, run)) for run in runs), most=_MOST)
    return f"rank{'s' * (len(known) > 1)} {listed}"


def ranks_named(text: str) -> tuple[int, ...]:
    """The ranks that a message of this library names, as in "rank 3" and "ranks 0-2, 5", in its order."""
    found: dict[int, None] = {}
    for several in re.findall(r"\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", text):
        for part in several.split(", "):
            first, _, last = part.partition("-")
            found.update(dict.fromkeys(range(int(first), int(last or first) + 1)))
    return tuple(found)

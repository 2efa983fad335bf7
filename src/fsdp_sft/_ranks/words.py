"""Ranks in words."""

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

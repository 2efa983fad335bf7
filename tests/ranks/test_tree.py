"""The tree over which ranks agree: what comes around, and a rank that is lost."""

import os
import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_sft._ranks import agree
from fsdp_sft._ranks.tree import through_root
from fsdp_sft.errors import LostRankError
from tests.harness.ranks import RankFailedError, on_ranks, run_distributed


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@on_ranks(timeout=60)
def test_what_all_ranks_have_comes_around_in_their_order(ranks: int) -> None:
    for length in (0, 1, 402, 403, 404, 5000, 1 << 20):
        for of_rank in ([length] * ranks, [length * (other % 2) for other in range(ranks)]):
            everyone = [bytes([r]) * many for r, many in enumerate(of_rank)]
            own = everyone[dist.get_rank()]
            assert through_root(dist.group.WORLD, own, b"|".join) == b"|".join(everyone)


def _lose(lost: int, folder: Path) -> None:
    agree.control_group()
    if dist.get_rank() == lost:
        os._exit(7)
    time.sleep(0.3)
    with pytest.raises(LostRankError, match=f"rank {lost}: "):
        agree.all_gather_objects(None)
    (folder / str(dist.get_rank())).touch()
    # Nobody learns of it by the end of another process: all have heard before the first ends.
    deadline = time.monotonic() + 30
    while len(list(folder.iterdir())) < 5:
        assert time.monotonic() < deadline, f"only {sorted(folder.iterdir())} have heard"
        time.sleep(0.05)
    dist.destroy_process_group()  # which the lost one has no part in


@pytest.mark.parametrize("lost", [0, 3, 5])
def test_every_rank_hears_of_the_one_that_is_lost(lost: int, tmp_path: Path) -> None:
    codes = [7 if rank == lost else None for rank in range(6)]
    with pytest.raises(RankFailedError, match=re.escape(f"exit codes {codes} without a traceback")):
        run_distributed(_lose, 6, lost, tmp_path, timeout=60)

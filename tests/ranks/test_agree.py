"""One verdict per phase, and the first error raised on every rank."""

import gc
import os
import re
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft._ranks import agree
from tests.harness.models import tiny_model
from tests.harness.ranks import RankFailedError, mesh_here, on_ranks, run_distributed


class _Picky(Exception):
    """Does not come back from a pickle: its constructor wants more than its args."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class _Mute(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


class _Odd(Exception):
    def __reduce__(self) -> Any:
        return (ValueError, ())


class _Large(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.all = bytes(2 << 20)


class _OfTheCaller(KeyError):
    pass


@on_ranks(3, timeout=30)
def test_all_ranks_raise_the_first_error() -> None:
    rank = dist.get_rank()
    with agree.agreed("doing nothing"):
        pass
    with pytest.raises(FileNotFoundError, match="gone from rank 1") as caught, agree.agreed("looking"):
        if rank == 0:
            time.sleep(0.3)
            raise ValueError("rank 0 came later")
        if rank == 1:
            raise FileNotFoundError("gone from rank 1")
    (note,) = caught.value.__notes__
    assert note.startswith("rank 1 failed first while looking (failed: 0, 1)")
    with (
        pytest.raises(_Picky if rank == 2 else fs.RemoteRankError, match="1 and 2"),
        agree.agreed("being picky"),
    ):
        if rank == 2:
            raise _Picky(1, 2)
    assert agree.all_reduce_sum([1, rank]) == [3.0, 3.0]
    assert agree.all_gather_objects({"rank": rank}) == [{"rank": r} for r in range(3)]
    assert agree.control_group() is agree.control_group()
    assert agree.control_group() is not dist.group.WORLD


def _of_ours(name: str) -> Exception:
    error: Exception = getattr(fs, name)(f"something about {name}", 3)
    vars(error)["where"] = Path("/a")
    error.add_note("a note")
    return error


@on_ranks(2, timeout=30)
def test_errors_arrive_as_they_were_or_by_their_text() -> None:
    rank = dist.get_rank()
    for error in (
        *(_of_ours(name) for name in fs.__all__ if name.endswith("Error")),
        KeyError("k"),
        FileNotFoundError(2, "No such file or directory", "/a"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ZeroDivisionError(),
        torch.OutOfMemoryError("no room"),
        ExceptionGroup("several", [ValueError("x")]),
        _OfTheCaller("k"),
    ):
        notes = len(getattr(error, "__notes__", ()))
        with pytest.raises(type(error)) as caught:
            agree.raise_first(error if rank == 1 else None, "failing")
        told = {**vars(caught.value), "__notes__": caught.value.__notes__[:notes]}
        assert told == {**vars(error), "__notes__": getattr(error, "__notes__", [])[:notes]}
        assert (type(caught.value), str(caught.value), repr(caught.value.args)) == (
            type(error),
            str(error),
            repr(error.args),
        )
    of_one_rank = type("OfOneRank", (Exception,), {"__module__": __name__})
    globals().update({"OfOneRank": of_one_rank} if rank == 1 else {})
    for text, error in {
        "_Picky: 1 and 2": _Picky(1, 2),
        "_Mute": _Mute("x"),
        "_Odd: x": _Odd("x"),
        "OfOneRank: x": of_one_rank("x"),
        "_Large: x": _Large("x"),
        "ValueError": ValueError(10**5000),
        "Local: tensor([1.])": type("Local", (Exception,), {})(torch.ones(1)),
    }.items():
        with pytest.raises(Exception) as caught:
            agree.raise_first(error if rank == 1 else None, "failing")
        assert type(caught.value) is fs.RemoteRankError if rank == 0 else caught.value is error
        assert rank == 1 or str(caught.value) == f"rank 1 raised {text}"


def test_without_a_group_there_is_nothing_to_exchange() -> None:
    with pytest.raises(KeyError), agree.agreed("alone"):
        raise KeyError("x")
    assert (agree.all_reduce_sum([2]), agree.all_gather_objects("a")) == ([2], ["a"])
    with pytest.raises(RuntimeError, match="init_distributed"):
        agree.control_group()


def test_the_control_group_ends_with_its_process_group() -> None:
    groups = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        groups.append(weakref.ref(agree.control_group()))
        assert agree.control_group() is groups[-1]()
        dist.destroy_process_group()
        gc.collect()
        assert groups[-1]() is None


def _decide_on_rank_0() -> None:
    rank = dist.get_rank()
    assert agree.share({"of": rank}) == {"of": 0}
    decided = []

    def decide(everyone: list[int]) -> int:
        decided.append(rank)
        return sum(everyone)

    assert (agree.through_rank_0("adding", lambda: rank + 1, decide), decided) == (6, [0] * (rank == 0))

    def fail_on_the_last() -> int:
        if rank == 2:
            raise FileNotFoundError("gone from rank 2")
        return 1

    with pytest.raises(FileNotFoundError, match="gone from rank 2") as caught:
        agree.through_rank_0("looking", fail_on_the_last, decide)
    (note,) = caught.value.__notes__
    assert note.startswith("rank 2 failed first while looking (failed: 2)")
    assert decided == [0] * (rank == 0), "there is nothing to decide on"

    def refuse(everyone: list[int]) -> None:
        raise _Picky(1, 2)

    with pytest.raises(_Picky if rank == 0 else fs.RemoteRankError, match="1 and 2") as refused:
        agree.through_rank_0("deciding", lambda: rank, refuse)
    (note,) = refused.value.__notes__
    assert note.startswith("rank 0 failed first while deciding (failed: 0)")
    assert agree.through_rank_0("adding", lambda: rank, sum) == 3
    for own, decide in (
        (lambda: threading.Lock() if rank == 1 else rank, len),
        (lambda: rank, lambda everyone: threading.Lock()),
    ):
        with pytest.raises(TypeError, match="cannot pickle"):
            agree.through_rank_0("what no message holds", own, decide)
    assert agree.through_rank_0("adding", lambda: rank, sum) == 3


def test_rank_0_decides_for_all() -> None:
    run_distributed(_decide_on_rank_0, 3, timeout=30)
    assert (agree.through_rank_0("alone", lambda: 4, sum), agree.share("alone")) == (4, "alone")
    with pytest.raises(KeyError):
        agree.through_rank_0("alone", lambda: {}["x"], sum)


def _one_saves(root: str, first: int) -> str:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here())
    agree.control_group()
    started = time.monotonic()
    with pytest.raises(fs.RemoteRankError) as caught:
        if dist.get_rank() == first:
            fs.save_checkpoint(root, 1, model=model)
        else:
            list(fs.windows([{"input_ids": [3]}], 1))
    assert time.monotonic() - started < 20
    assert agree.all_reduce_sum([1.0]) == [float(dist.get_world_size())], "ranks go on together"
    return str(caught.value)


@pytest.mark.parametrize("first", [0, 2])
def test_ranks_in_different_calls_are_named(first: int, tmp_path: Path) -> None:
    for told in run_distributed(_one_saves, 3, str(tmp_path), first, timeout=60):
        assert re.search(r"is in save_checkpoint \(test_agree.py:\d+\)", told)
        assert re.search(r"is in windows \(test_agree.py:\d+\)", told)
        assert "all ranks have to make the same calls in the same order" in told


# --- the tree over which ranks agree: what comes around, and a rank that is lost ----------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@on_ranks(timeout=60)
def test_what_all_ranks_have_comes_around_in_their_order(ranks: int) -> None:
    for length in (0, 1, 402, 403, 404, 5000, 1 << 20):
        for of_rank in ([length] * ranks, [length * (other % 2) for other in range(ranks)]):
            everyone = [bytes([r]) * many for r, many in enumerate(of_rank)]
            own = everyone[dist.get_rank()]
            assert agree.through_root(dist.group.WORLD, own, b"|".join) == b"|".join(everyone)


def _lose(lost: int, folder: Path) -> None:
    agree.control_group()
    if dist.get_rank() == lost:
        os._exit(7)
    time.sleep(0.3)
    with pytest.raises(fs.LostRankError, match=f"rank {lost}: "):
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

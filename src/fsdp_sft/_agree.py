"""Ranks agreeing: one verdict per phase, and the first error raised everywhere.

A collective that one rank never enters hangs the others until the time-out. Functions that do I/O
therefore end each phase with a verdict: every rank says whether it succeeded, and if any did not, all of
them raise the error that came first. Verdicts travel over a gloo group of their own, which never shares a
communicator with training.
"""

import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_CONTROL_TIMEOUT = timedelta(minutes=30)
# Weak: destroy_process_group must end the groups; the interpreter's exit is too late for gloo's threads.
_groups: dict[str, tuple[weakref.ref[dist.ProcessGroup], weakref.ref[dist.ProcessGroup]]] = {}
_this_thread = threading.local()


class RemoteRankError(RuntimeError):
    """Another rank failed with an error that could not be sent over as it was."""


def is_distributed() -> bool:
    """Whether there is a process group of more than one rank to agree with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def control_group(timeout: timedelta = _CONTROL_TIMEOUT) -> dist.ProcessGroup:
    """The gloo group over all ranks for verdicts, counts and manifests; made on first use.

    Collective: all ranks, the first time it is called for a default process group.
    """
    own: dist.ProcessGroup | None = getattr(_this_thread, "group", None)
    return own if own is not None else _group("control", timeout)


def background_group(timeout: timedelta = _CONTROL_TIMEOUT) -> dist.ProcessGroup:
    """A second such group, for a thread that agrees while the main thread may be agreeing too.

    Collective: all ranks, the first time it is called for a default process group.
    """
    return _group("background", timeout)


@contextmanager
def agreeing_over(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let everything that this thread agrees on travel over ``group``; None changes nothing."""
    before = getattr(_this_thread, "group", None)
    _this_thread.group = group if group is not None else before
    try:
        yield
    finally:
        _this_thread.group = before


def _group(name: str, timeout: timedelta) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("no process group: call fsdp_sft.init_distributed() first")
    known = _groups.get(name)
    group = known[1]() if known is not None and known[0]() is world else None
    if group is None:
        group = dist.new_group(backend="gloo", timeout=timeout)
        _groups[name] = (weakref.ref(world), weakref.ref(group))
    return group


def all_gather_objects(value: Any) -> list[Any]:
    """What each rank has, in rank order; ``[value]`` without a process group.

    Collective: all ranks.
    """
    if not is_distributed():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=control_group())
    return gathered


def all_reduce_sum(values: list[float]) -> list[float]:
    """Element-wise float64 sum over all ranks; exact for integers below 2**53.

    Collective: all ranks, with lists of one length.
    """
    if not is_distributed():
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, group=control_group())
    return [float(v) for v in total]


def all_reduce_min(value: int) -> int:
    """The smallest value of any rank.

    Collective: all ranks.
    """
    return -all_reduce_max(-value)


def all_reduce_max(value: int) -> int:
    """The largest value of any rank.

    Collective: all ranks.
    """
    if not is_distributed():
        return value
    largest = torch.tensor([value])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=control_group())
    return int(largest.item())


@contextmanager
def agreed(phase: str) -> Iterator[None]:
    """Run a block that may fail on some ranks, and fail on all of them if it failed on any.

    Every rank raises the error that happened first, as the same type, with a note that names the rank and
    the phase. The block itself must not contain collectives that a failing rank would leave the others in.

    Collective: all ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_first(error, phase)


def raise_first(error: Exception | None, phase: str) -> None:
    """Exchange one verdict and raise the earliest error of any rank on every rank.

    Collective: all ranks.
    """
    if not is_distributed():
        if error is not None:
            raise error
        return
    rank = dist.get_rank()
    verdicts = all_gather_objects(None if error is None else (time.time(), rank, _portable(error)))
    failed = [verdict for verdict in verdicts if verdict is not None]
    if not failed:
        return
    _, first_rank, portable = min(failed, key=lambda verdict: verdict[:2])
    first = error if first_rank == rank and error is not None else _revive(portable, first_rank)
    ranks = [verdict[1] for verdict in failed]
    first.add_note(f"rank {first_rank} failed first while {phase} (failed: {_listed(ranks)})")
    raise first


def _portable(error: Exception) -> tuple[bytes | None, str]:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # an exception class with arguments of its own may not survive pickling
        return None, f"{type(error).__name__}: {error}"
    return pickled, f"{type(error).__name__}: {error}"


def _revive(portable: tuple[bytes | None, str], rank: int) -> Exception:
    pickled, text = portable
    if pickled is None:
        return RemoteRankError(f"rank {rank} raised {text}")
    error = pickle.loads(pickled)
    return error if isinstance(error, Exception) else RemoteRankError(f"rank {rank} raised {text}")


def _listed(ranks: list[int], most: int = 8) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:most])
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"

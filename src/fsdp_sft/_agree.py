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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp_sft.errors import LostRankError, RemoteRankError

T = TypeVar("T")

_CONTROL_TIMEOUT = timedelta(minutes=30)
_POLL_SECONDS = (0.05, 2.0)  # between two questions how the work goes: at first, and later
# Weak: destroy_process_group must end the groups; the interpreter's exit is too late for gloo's threads.
_groups: dict[str, tuple[weakref.ref[dist.ProcessGroup], weakref.ref[dist.ProcessGroup]]] = {}
_timeout = _CONTROL_TIMEOUT  # of the control group that was made last
_this_thread = threading.local()


def is_distributed() -> bool:
    """Whether there is a process group of more than one rank to agree with."""
    return world_size() > 1


def this_rank() -> int:
    """This process's rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def control_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The gloo group over all ranks for verdicts, counts and manifests; made on first use.

    Collective: all ranks, the first time it is called for a default process group.
    """
    own: dist.ProcessGroup | None = getattr(_this_thread, "group", None)
    return own if own is not None else _group("control", timeout)


def background_group() -> dist.ProcessGroup:
    """A second such group, for a thread that agrees while the main thread may be agreeing too.

    Its time-out is the control group's. Collective: all ranks, the first time it is called for a default
    process group.
    """
    control_group()
    return _group("background", None)


@contextmanager
def agreeing_over(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let everything that this thread agrees on travel over ``group``; None changes nothing."""
    before = getattr(_this_thread, "group", None)
    _this_thread.group = group if group is not None else before
    try:
        yield
    finally:
        _this_thread.group = before


def _group(name: str, timeout: timedelta | None) -> dist.ProcessGroup:
    global _timeout
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("no process group: call fsdp_sft.init_distributed() first")
    known = _groups.get(name)
    group = known[1]() if known is not None and known[0]() is world else None
    if group is None:
        if name == "control":
            _timeout = timeout or _CONTROL_TIMEOUT
        with answered():
            group = dist.new_group(backend="gloo", timeout=_timeout)
        _groups[name] = (weakref.ref(world), weakref.ref(group))
    return group


@contextmanager
def answered() -> Iterator[None]:
    """Around a collective over a group of this module: ``LostRankError`` if it breaks off.

    gloo notices at once that a process has ended, and one that only stands still after the time-out that
    ``init_distributed`` was given.
    """
    try:
        yield
    except RuntimeError as error:  # gloo's errors have no type of their own
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise LostRankError(
            f"another rank has died, or has not answered within {_timeout.total_seconds():g} s ({detail}); "
            "end the job and start it again: it continues from its last checkpoint"
        ) from error


def all_gather_objects(value: Any) -> list[Any]:
    """What each rank has, in rank order; ``[value]`` without a process group.

    Collective: all ranks.
    """
    if not is_distributed():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    with answered():
        dist.all_gather_object(gathered, value, group=control_group())
    return gathered


def all_reduce_sum(values: list[float]) -> list[float]:
    """Element-wise float64 sum over all ranks; exact for integers below 2**53.

    Collective: all ranks, with lists of one length.
    """
    if not is_distributed():
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    with answered():
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
    with answered():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=control_group())
    return int(largest.item())


def while_others_wait(working: bool, work: Callable[[], T], phase: str) -> T | None:
    """Run ``work`` where ``working`` is true; all ranks poll until it ends or fails.

    For what may take longer than any collective's time-out: downloads, uploads, another job's work. It runs
    in a thread, and when it fails on one rank the others need not wait for the rest of theirs.

    Returns:
        What ``work`` returned on this rank; None where it did not run.

    Collective: all ranks.
    """
    results: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="fsdp_sft-work", daemon=True) if working else None
    if thread is not None:
        thread.start()
    pause = _POLL_SECONDS[0]
    while True:
        if thread is not None:
            thread.join(pause)
        elif is_distributed():
            time.sleep(pause)
        states: list[Any] = all_gather_objects((thread is not None and thread.is_alive(), bool(failures)))
        if any(failed for _, failed in states) or not any(busy for busy, _ in states):
            break
        pause = min(pause * 2, _POLL_SECONDS[1])
    with agreed(phase):
        if failures:
            raise failures[0]
    return results[0] if results else None


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
    try:
        verdicts = all_gather_objects(None if error is None else (time.time(), rank, _portable(error)))
    except LostRankError as lost:
        if error is not None:
            lost.add_note(f"this rank itself had failed while {phase}: {error!r}")
        raise
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

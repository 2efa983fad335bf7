"""Agreement between ranks: one verdict per phase, and the first error raised on every rank.

A collective that one rank never enters hangs the others until the time-out. Functions that do I/O
therefore end each phase with a verdict: every rank says whether it succeeded, and if any did not, all of
them raise the error that came first. Verdicts use a separate gloo group, which shares no communicator with
training, and travel along a tree (`tree.py`), so no rank talks to all others.
"""

import logging
import math
import operator
import os
import re
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from fsdp_sft._compat.groups import careful_gloo
from fsdp_sft._process.callers import outermost_call
from fsdp_sft._process.limits import says_too_many_files, too_many_files
from fsdp_sft._ranks.message import pack, portable, revived, unpack
from fsdp_sft._ranks.tree import Call, Combine, Tree
from fsdp_sft.errors import LostRankError, RemoteRankError, abridged

T = TypeVar("T")
A = TypeVar("A")

_CONTROL_TIMEOUT = timedelta(minutes=30)
_POLL_SECONDS = (0.05, 2.0)  # between two polls of running work: at first, and at most
# Name to (default group, group made for it). Weak references, so that destroy_process_group ends the groups:
# when the interpreter exits it is too late for gloo's threads.
_groups: dict[str, tuple[weakref.ref[dist.ProcessGroup], weakref.ref[dist.ProcessGroup]]] = {}
_timeout = _CONTROL_TIMEOUT  # time-out of the control group that was made last
_this_thread = threading.local()


def is_distributed() -> bool:
    """Whether there is a process group of more than one rank to agree with."""
    return world_size() > 1


def this_rank() -> int:
    """This process's rank in the default process group; 0 without one.

    In a thread with a group of its own it is the rank there, also after ``destroy_process_group``: a save in
    the background must not take itself for a job of one.
    """
    own: dist.ProcessGroup | None = getattr(_this_thread, "group", None)
    if own is not None:
        return own.rank()
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def tell(logger: logging.Logger, message: str, *values: Any) -> None:
    """A line of the log at INFO, from rank 0: what a run has done."""
    if this_rank() == 0:
        logger.info(message, *values)


def world_size() -> int:
    """Number of ranks in the default process group; 1 without one. In a thread as for ``this_rank``."""
    own: dist.ProcessGroup | None = getattr(_this_thread, "group", None)
    if own is not None:
        return own.size()
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def control_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The gloo group of all ranks for verdicts, counts and manifests, made on first use.

    Collective: all ranks, the first time it is called for a default process group.
    """
    own: dist.ProcessGroup | None = getattr(_this_thread, "group", None)
    return own if own is not None else _group("control", timeout)


def background_group() -> dist.ProcessGroup:
    """A second control group, for a thread whose agreements may overlap with the main thread's.

    It has the control group's time-out.

    Collective: all ranks, the first time it is called for a default process group.
    """
    control_group()
    return _group("background", None)


@contextmanager
def agreeing_over(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Context in which all agreements of this thread use ``group``; None changes nothing."""
    before = getattr(_this_thread, "group", None)
    _this_thread.group = group if group is not None else before
    try:
        yield
    finally:
        _this_thread.group = before


def _group(name: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """The group of that name for the current default process group; made if there is none."""
    global _timeout
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("no process group: call fsdp_sft.init_distributed() first")
    known = _groups.get(name)
    group = known[1]() if known is not None and known[0]() is world else None
    if group is None:
        if name == "control":
            _timeout = timeout or _CONTROL_TIMEOUT
        with answered(), careful_gloo():
            group = dist.new_group(backend="gloo", timeout=_timeout)
            # A first message along the tree connects its ranks: gloo connects two ranks when they first
            # communicate, and notices the end of a rank by the connection to it.
            Tree(group).around(b"", operator.add)
        _groups[name] = (weakref.ref(world), weakref.ref(group))
    return group


@contextmanager
def answered() -> Iterator[None]:
    """Turn a failure of communication inside the block into ``LostRankError``.

    gloo notices at once that a process has ended, and after the time-out of ``init_distributed`` that it no
    longer answers.
    """
    try:
        yield
    except RemoteRankError:
        raise
    except RuntimeError as error:  # gloo's errors have no type of their own
        detail = _said_by_gloo(error)
        if says_too_many_files(error):
            raise too_many_files(f"connecting to another rank ({detail})") from error
        raise LostRankError(
            f"another rank has died, or has not answered within {_timeout.total_seconds():g} s ({detail}); "
            "end the job and start it again: it continues from its last checkpoint. If that rank came to the "
            "end of its program, this one alone has made a call that is for all ranks (if rank == 0: ...). "
            "If ranks of several nodes never met, name their common interface in GLOO_SOCKET_IFNAME"
        ) from error


def _said_by_gloo(error: RuntimeError) -> str:
    """The message of an error of gloo, without the source line before it and the advice after it."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    text = re.sub(r"\[[^\]]*\.(?:cc|cpp|h):\d+\] *", "", text)
    return text.partition(". ")[0].rstrip(".")


def _around(kind: str, own: bytes, combine: Combine, decide: Callable[[bytes], bytes] | None = None) -> bytes:
    """``Tree.around`` over this thread's control group, for an exchange of that kind."""
    group = control_group()
    with answered():
        return Tree(group, _call(kind)).around(own, combine, decide)


def _call(kind: str) -> Call:
    """The call of this library that an exchange is for, by its name and its place in the caller's code."""
    call = outermost_call()
    if call is None:
        return Call(kind)
    ours, caller = call
    name = ours.f_code.co_name
    at = "" if caller is None else f" ({os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno})"
    return Call(f"{name} {kind}", name.lstrip("_") + at)


def share(value: Any) -> Any:
    """Rank 0's ``value``, on every rank; ``value`` itself without a process group.

    Collective: all ranks.
    """
    if not is_distributed():
        return value
    own = pack(value) if this_rank() == 0 else b""
    return unpack(_around("share", own, lambda low, high: low))


def all_gather_objects(value: Any) -> list[Any]:
    """The values of all ranks, in rank order; ``[value]`` without a process group.

    For values that every rank needs of every other; ``share`` and ``through_rank_0`` cost less.

    Collective: all ranks.
    """
    if not is_distributed():
        return [value]
    frames = _around("gather", _frame(pack(value)), operator.add)
    return [unpack(own) for own in _framed(frames)]


_LENGTH = struct.Struct("<q")


def _frame(data: bytes) -> bytes:
    """Data prefixed with its length, so that frames can be joined and split again."""
    return _LENGTH.pack(len(data)) + data


def _framed(frames: bytes) -> Iterator[bytes]:
    """The data of each of several joined frames, in order."""
    position = 0
    while position < len(frames):
        (length,) = _LENGTH.unpack_from(frames, position)
        position += _LENGTH.size
        yield frames[position : position + length]
        position += length


def all_reduce_sum(values: list[float]) -> list[float]:
    """Element-wise float64 sum over all ranks, bitwise the same on all; exact for integers below 2**53.

    Collective: all ranks, with lists of the same length.
    """
    return _reduced(values, operator.add)


def all_reduce_min(value: int) -> int:
    """The smallest of all ranks' values.

    Collective: all ranks.
    """
    return int(_reduced([value], min)[0])


def all_reduce_max(value: int) -> int:
    """The largest of all ranks' values.

    Collective: all ranks.
    """
    return int(_reduced([value], max)[0])


def _reduced(values: list[float], of_two: Callable[[float, float], float]) -> list[float]:
    """Element-wise reduction over all ranks by a function of two numbers."""
    if not is_distributed():
        return list(values)
    numbers = struct.Struct(f"<{len(values)}d")

    def combine(low: bytes, high: bytes) -> bytes:
        return numbers.pack(*map(of_two, numbers.unpack(low), numbers.unpack(high)))

    return list(numbers.unpack(_around(f"{of_two.__name__} {len(values)}", numbers.pack(*values), combine)))


def while_others_wait(working: bool, work: Callable[[], T], phase: str) -> T | None:
    """Run ``work`` where ``working`` is true; all ranks poll until it ends or fails.

    For work that may take longer than a collective's time-out: downloads, uploads, waiting for another job.
    ``work`` runs in a thread. If it fails on one rank, the others raise that error without waiting for their
    own work.

    Args:
        working: Whether this rank works.
        work: What to do; must not contain collectives.
        phase: Name of the phase, for the error's note.

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
        busy, failed = all_reduce_sum([thread is not None and thread.is_alive(), bool(failures)])
        if failed or not busy:
            break
        pause = min(pause * 2, _POLL_SECONDS[1])
    with agreed(phase):
        if failures:
            raise failures[0]
    return results[0] if results else None


@contextmanager
def agreed(phase: str) -> Iterator[None]:
    """Run a block that may fail on some ranks, and raise on all ranks if it failed on any.

    Every rank raises the error that happened first, as the same type, with a note that names the rank and the
    phase. The block must not contain collectives: a rank that fails before one would leave others waiting.

    Collective: all ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_first(error, phase)


def raise_first(error: Exception | None, phase: str) -> None:
    """Exchange one verdict, and raise the earliest error of any rank on every rank.

    If no rank has an error, only one number travels to rank 0 and back.

    Collective: all ranks.
    """
    if not is_distributed():
        if error is not None:
            raise error
        return
    when = math.inf if error is None else time.time()
    try:
        if _reduced([when], min)[0] == math.inf:
            return
        verdicts = all_gather_objects(_verdict(error, when))
    except (LostRankError, RemoteRankError) as broken:
        _note_own(error, broken, phase)
        raise
    _raise_earliest(verdicts, error, phase)


def through_rank_0(phase: str, own: Callable[[], A], decide: Callable[[list[A]], T]) -> T:
    """Run ``own`` on every rank, then ``decide`` on rank 0 with what they all returned, in rank order.

    The two are one phase: an error on any rank, or in ``decide``, is raised on all ranks, as by ``agreed``.

    Args:
        phase: Name of the phase, for the error's note.
        own: What each rank does; must not contain collectives, as in ``agreed``.
        decide: What rank 0 does with the results; not run if ``own`` failed on any rank.

    Returns:
        What ``decide`` returned, on every rank.

    Collective: all ranks.
    Memory: Rank 0 holds what all ranks returned, the others what they pass on.
    """
    error: Exception | None = None
    value: A | None = None
    mine = b""
    try:
        value = own()
        mine = pack((None, value)) if is_distributed() else b""
    except Exception as caught:
        error = caught
    if not is_distributed():
        if error is not None:
            raise error
        return decide([value])  # type: ignore[list-item]
    deciding: Exception | None = None

    def judge(frames: bytes) -> bytes:
        nonlocal deciding
        told = [unpack(frame) for frame in _framed(frames)]
        verdicts = [verdict for verdict, _ in told if verdict is not None]
        if not verdicts:
            try:
                return pack(([], decide([value for _, value in told])))
            except Exception as caught:
                deciding = caught
                verdicts = [_verdict(caught, time.time())]
        return pack((verdicts, None))

    when = time.time()
    mine = mine if error is None else pack((_verdict(error, when), None))
    try:
        verdicts, answer = unpack(_around("decide", _frame(mine), operator.add, judge))
    except (LostRankError, RemoteRankError) as broken:
        _note_own(error, broken, phase)
        raise
    _raise_earliest(verdicts, error or deciding, phase)
    decided: T = answer
    return decided


def agree_on(phase: str, **facts: Any) -> None:
    """Raise on all ranks if ranks differ in a fact.

    Args:
        phase: Name of the phase, for the error.
        facts: Plain values by their names.

    Raises:
        ValueError: The message names the fact, two ranks and what each has.

    Collective: all ranks.
    """

    def compare(everyone: list[dict[str, Any]]) -> None:
        apart = difference(list(enumerate(everyone)))
        if apart:
            raise ValueError(f"{phase}: ranks differ in {apart}; give all of them the same")

    through_rank_0(phase, lambda: facts, compare)


def difference(by_rank: list[tuple[int, dict[str, Any]]]) -> str:
    """The facts in which two ranks differ, in words that name both; empty if all ranks agree."""
    first, known = by_rank[0]
    for rank, own in by_rank[1:]:
        names = [*known, *(name for name in own if name not in known)]
        apart = [name for name in names if repr(known.get(name)) != repr(own.get(name))]
        if apart:
            named = ", ".join(_apart(name, known.get(name), own.get(name)) for name in apart)
            return f"{named}, on ranks {first} and {rank}"
    return ""


def _apart(name: str, one: Any, other: Any) -> str:
    """How a fact differs on two ranks: what each has that the other lacks, or both values."""
    if isinstance(one, tuple) and isinstance(other, tuple) and set(one) != set(other):
        both = ((one, other), (other, one))
        mine, theirs = (abridged([str(v) for v in a if v not in b], most=4) for a, b in both)
        return f"{name}: {mine or 'nothing more'} and {theirs or 'nothing more'}"
    return f"{name}={one!r} and {other!r}"


_Verdict = tuple[float, int, dict[str, Any]]  # when, rank, error


def _verdict(error: Exception | None, when: float) -> _Verdict | None:
    """This rank's error and its time, in a form that can be sent; None without an error."""
    return None if error is None else (when, this_rank(), portable(error))


def _raise_earliest(verdicts: list[_Verdict | None], own: Exception | None, phase: str) -> None:
    """Raise the earliest of all ranks' errors; on the rank it comes from, the original with its traceback."""
    failed = [verdict for verdict in verdicts if verdict is not None]
    if not failed:
        return
    _, first_rank, told = min(failed, key=lambda verdict: verdict[:2])
    first = own if first_rank == this_rank() and own is not None else revived(told, first_rank)
    ranks = [verdict[1] for verdict in failed]
    at = f", at {told['place']}" if told.get("place") else ""
    first.add_note(f"rank {first_rank} failed first while {phase} (failed: {abridged(map(str, ranks))}){at}")
    raise first


def _note_own(error: Exception | None, broken: Exception, phase: str) -> None:
    """Note on an error about another rank that this rank had failed too."""
    if error is not None:
        broken.add_note(f"this rank itself had failed while {phase}: {error!r}")

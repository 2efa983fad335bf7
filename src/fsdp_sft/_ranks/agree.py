"""Agreement between ranks: one verdict per phase, and the first error raised on every rank.

A collective that one rank never enters hangs the others until the time-out. Functions that do I/O
therefore end each phase with a verdict: every rank says whether it succeeded, and if any did not, all of
them raise the error that came first. Verdicts use a separate gloo group, which shares no communicator with
training, and travel along a tree (below), so no rank talks to all others.
"""

import functools
import itertools
import logging
import operator
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp_sft._compat.groups import careful_gloo
from fsdp_sft._process.callers import outermost_call
from fsdp_sft._process.limits import blame_the_limit
from fsdp_sft.errors import LostRankError, RemoteRankError, abridged

T = TypeVar("T")
A = TypeVar("A")

_CONTROL_TIMEOUT = timedelta(minutes=30)
_POLL_SECONDS = (0.05, 2.0)  # between two polls of running work: at first, and at most
# Name to (default group, group made for it). Weak references, so that destroy_process_group ends the groups:
# when the interpreter exits it is too late for gloo's threads.
_groups: dict[str, tuple[weakref.ref[dist.ProcessGroup], weakref.ref[dist.ProcessGroup]]] = {}
_timeout = _CONTROL_TIMEOUT  # time-out of the control group that was made last
_group_of_thread: ContextVar[dist.ProcessGroup | None] = ContextVar("group", default=None)


def this_rank() -> int:
    """This process's rank in the default process group; 0 without one.

    In a thread with a group of its own it is the rank there, also after ``destroy_process_group``: a save in
    the background must not take itself for a job of one.
    """
    group = _group_of_thread.get() or dist.group.WORLD
    return 0 if group is None else group.rank()


def world_size() -> int:
    """Number of ranks in the default process group; 1 without one. In a thread as for ``this_rank``."""
    group = _group_of_thread.get() or dist.group.WORLD
    return 1 if group is None else group.size()


def said_ranks(ranks: Iterable[int]) -> str:
    """Ranks in short: ``"rank 3"``, ``"ranks 0, 1, 5"``; of very many the first."""
    known = sorted(ranks)
    return f"rank{'s' * (len(known) > 1)} {abridged(map(str, known), most=32)}"


def tell(logger: logging.Logger, message: str, *values: Any) -> None:
    """A line of the log at INFO, from rank 0: what a run has done."""
    if this_rank() == 0:
        logger.info(message, *values)


def control_group(timeout: timedelta | None = None, *, name: str = "control") -> dist.ProcessGroup:
    """The gloo group of all ranks for verdicts, counts and manifests, made on first use.

    Args:
        timeout: Time-out of the control group, which a further group has too; None takes 30 minutes.
        name: Another name than the default is a further group, for a thread whose agreements may overlap with
            the main thread's.

    Collective: all ranks, the first time it is called for a default process group and a name.
    """
    global _timeout
    own, world = _group_of_thread.get(), dist.group.WORLD
    if own is not None:
        return own
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
            through_root(group, b"", lambda everyone: b"")
        _groups[name] = (weakref.ref(world), weakref.ref(group))
    return group


@contextmanager
def agreeing_over(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Context in which all agreements of this thread use ``group``; None changes nothing."""
    token = _group_of_thread.set(group or _group_of_thread.get())
    try:
        yield
    finally:
        _group_of_thread.reset(token)


def connect_neighbours(group: dist.ProcessGroup | None) -> None:
    """Have gloo connect the ranks that its rings need: it notices the end of a rank by its connection."""
    if group is not None and group.size() > 1 and "cpu" in dist.get_backend_config(group):
        with answered():
            dist.all_reduce(torch.zeros(1), group=group)


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
        detail = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        blame_the_limit(error, f"connecting to another rank ({detail})")
        raise LostRankError(
            f"another rank has died, or has not answered within {_timeout.total_seconds():g} s ({detail}); "
            "end the job and start it again: it continues from its last checkpoint. If that rank came to the "
            "end of its program, this one alone has made a call that is for all ranks (if rank == 0: ...). "
            "If ranks of several nodes never met, name their common interface in GLOO_SOCKET_IFNAME"
        ) from error


def share(value: Any) -> Any:
    """Rank 0's ``value``, on every rank; ``value`` itself without a process group.

    Collective: all ranks.
    """
    return _decided(
        "share", "sharing a value", None, value if this_rank() == 0 else None, operator.itemgetter(0)
    )


def all_gather_objects(value: Any) -> list[Any]:
    """The values of all ranks, in rank order; ``[value]`` without a process group.

    For values that every rank needs of every other; ``share`` and ``through_rank_0`` cost less.

    Collective: all ranks.
    """
    return _decided("gather", "gathering values", None, value, list)


def all_reduce_sum(values: list[float]) -> list[float]:
    """Element-wise float64 sum over all ranks, bitwise the same on all; exact for integers below 2**53.

    Collective: all ranks, with lists of the same length.
    """
    return _decided(
        f"sum of {len(values)}",
        "adding",
        None,
        list(map(float, values)),
        lambda everyone: [functools.reduce(operator.add, one) for one in zip(*everyone, strict=True)],
    )


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
    if world_size() == 1:
        return work() if working else None
    done: Future[T | None] = Future()

    def run() -> None:
        try:
            done.set_result(work() if working else None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="fsdp_sft-work", daemon=True).start()
    pause, busy, failed = _POLL_SECONDS[0], 1.0, 0.0
    while busy and not failed:
        time.sleep(pause)
        pause = min(pause * 2, _POLL_SECONDS[1])
        busy, failed = all_reduce_sum([not done.done(), done.done() and done.exception() is not None])
    with agreed(phase):
        return done.result() if done.done() else None


@contextmanager
def agreed(phase: str, decide: Callable[[list[Any]], Any] = lambda everyone: None) -> Iterator[Any]:
    """Run a block that may fail on some ranks, and raise on all ranks if it failed on any.

    Every rank raises the error that happened first, as the same type, with a note that names the rank and the
    phase. The block must not contain collectives: a rank that fails before one would leave others waiting.

    Args:
        phase: Name of the phase, for the error's note.
        decide: What rank 0 makes of that which each rank's block has set as ``told``, in rank order.

    Yields:
        A namespace: the block sets ``told``, and after the block ``result`` is what rank 0 has made of it.

    Collective: all ranks.
    """
    error: Exception | None = None
    decision = SimpleNamespace(told=None)
    try:
        yield decision
    except Exception as caught:
        error = caught
    decision.result = _decided("verdict", phase, error, decision.told, decide)


def raise_first(error: Exception | None, phase: str) -> None:
    """Exchange one verdict, and raise the earliest error of any rank on every rank.

    Collective: all ranks.
    """
    _decided("verdict", phase, error, None, lambda everyone: None)


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
    with agreed(phase, decide) as decision:
        decision.told = own()
    return decision.result  # type: ignore[no-any-return]


def _decided(
    kind: str, phase: str, error: Exception | None, value: Any, decide: Callable[[list[Any]], T]
) -> T:
    """What rank 0 makes of all ranks' values, or the first error of any rank; one exchange, of that kind."""
    if world_size() == 1:
        if error is not None:
            raise error
        return decide([value])
    name, site = outermost_call()
    call = f"{name} {kind}"
    try:
        own = pickle.dumps((call, site, _failure(error), None if error else value))
    except Exception as caught:  # what cannot be sent
        own = pickle.dumps((call, site, _failure(caught), None))

    def answer(everyone: list[bytes]) -> bytes | Exception:
        nonlocal error
        try:
            messages = [pickle.loads(message) for message in everyone]
            for rank, (other, there, _, _) in enumerate(messages):
                if other != call:
                    return RemoteRankError(_different(rank, site, there))
            failures = [failure for _, _, failure, _ in messages if failure is not None]
            return pickle.dumps((failures, None if failures else decide([m[-1] for m in messages])))
        except Exception as caught:
            error = caught
            return pickle.dumps(([_failure(caught)], None))

    try:
        with answered():
            failures, decided = pickle.loads(through_root(control_group(), own, answer))
    except (LostRankError, RemoteRankError) as broken:
        if error is not None:
            broken.add_note(f"this rank itself had failed while {phase}: {error!r}")
        raise
    if failures:
        _, rank, text, pickled = min(failures)
        first: Exception = RemoteRankError(f"rank {rank} raised {text}")
        with suppress(Exception):  # its class may do anything, and need not exist in this process
            again = error if rank == this_rank() and error is not None else pickle.loads(pickled)
            if again is error or f"{type(again).__name__}: {again}" == text:
                first = again  # on the rank that it comes from the original, with its traceback
        first.add_note(
            f"rank {rank} failed first while {phase} (failed: "
            f"{abridged(str(each) for _, each, *_ in failures)})"
        )
        raise first
    return decided  # type: ignore[no-any-return]


_Failure = tuple[float, int, str, bytes]  # when, on which rank, its text, the error pickled
_MOST_PICKLED = 1 << 20  # bytes of an error that is sent as it is: it may hold anything


def _failure(error: Exception | None) -> _Failure | None:
    """An error as it is sent, from now; None without one. It never raises: the other ranks wait.

    The pickle is one within a message: where the error does not come back as it was, its text does.
    """
    if error is None:
        return None
    text, pickled = type(error).__name__, b""
    with suppress(Exception):  # its class may do anything when it is asked for its text or its attributes
        text = f"{text}: {error}"
        pickled = pickle.dumps(error)
    return time.time(), this_rank(), text, pickled if len(pickled) <= _MOST_PICKLED else b""


def _different(rank: int, root: str, site: str) -> str:
    """What rank 0 and another rank are told that are in different calls."""
    here, there = root or "another call", site or "another call"
    again = ", which one of them has come to more often (other numbers of rows, micro-batches or steps)"
    return (
        f"rank 0 is in {here} and rank {rank} is in {there}{again * (here == there)}: all ranks have to make "
        "the same calls in the same order. A call that is for all of them, made by one (if rank == 0: ...), "
        "is the usual reason"
    )


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
        if apart := difference(list(enumerate(everyone))):
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


# The tree: a message from every rank to rank 0, and its answer to all, over gloo's sends.
#
# N - 1 messages go up and N - 1 down, and a rank takes part in at most log2 N of each. gloo's own
# ``all_reduce`` is a ring in which every rank sends to its neighbour 2 (N - 1) times, and torch's
# ``all_gather_object`` two of them: ``benchmarks/results/checkpoints.md``.
#
# The tree is binomial: the parent of rank r is r without its lowest set bit. Its children are r + 1, r + 2,
# r + 4, ... below that bit, and all that lies below r follows it without a gap. Eight ranks:
#
#     0 --+-- 1
#         +-- 2 --- 3
#         +-- 4 --+-- 5
#                 +-- 6 --- 7

_LENGTH_BYTES = 8
_BLOCK = 512  # bytes of a message's first part, which both ends know; short ones fit into it
_MOST_BYTES = 1 << 28  # at a time, which gloo limits


def through_root(
    group: dist.ProcessGroup, own: bytes, answer: Callable[[list[bytes]], bytes | Exception]
) -> bytes:
    """Rank 0's answer to the messages of all ranks, on every rank.

    A rank that cannot reach another one says so to its neighbours before it raises, so that none waits for a
    rank that has given up.

    Args:
        group: A gloo group of all ranks.
        own: This rank's message.
        answer: What rank 0 answers to all messages, which are in rank order, or an error for all ranks. It
            must not raise: the others wait.

    Raises:
        RuntimeError: If a rank cannot be reached; on every rank that can be.
        Exception: What ``answer`` has returned; on every rank.

    Collective: all ranks of the group.
    """
    rank, size = group.rank(), group.size()
    # The lowest set bit. Rank 0, the root, has none: all powers of 2 are its children.
    below = rank & -rank or 1 << (size - 1).bit_length()
    children = [rank + (1 << bit) for bit in range(below.bit_length() - 1) if rank + (1 << bit) < size]
    received = [_receive(group, child) for child in children]
    lost = next((one for one in received if isinstance(one, Exception)), None)
    message: Any = lost or [own, *itertools.chain.from_iterable(received)]
    if rank:
        _send(group, rank - below, message)  # if this fails, so does receiving the answer
        message = _receive(group, rank - below)
    elif lost is None:
        message = answer(message)
    for child in reversed(children):
        message = _send(group, child, message) or message
    if isinstance(message, Exception):
        raise message
    return message  # type: ignore[no-any-return]


def _send(group: dist.ProcessGroup, peer: int, message: Any) -> RuntimeError | None:
    """Send a message; returns the error for all ranks if that rank is lost."""
    content = pickle.dumps(message)
    framed = len(content).to_bytes(_LENGTH_BYTES) + content
    try:
        for part in (framed[:_BLOCK].ljust(_BLOCK, b"\0"), framed[_BLOCK:]):
            _pass(group.send, bytearray(part), peer)
    except RuntimeError as error:  # gloo's errors have no type of their own
        return RuntimeError(f"rank {peer}: {error}"[:300])
    return None


def _receive(group: dist.ProcessGroup, peer: int) -> Any:
    """Receive a message; an error for all ranks if that rank is lost."""
    try:
        first = _pass(group.recv, bytearray(_BLOCK), peer)
        more = _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES]) - _BLOCK
        rest = _pass(group.recv, bytearray(max(0, more)), peer)
    except RuntimeError as error:
        return RuntimeError(f"rank {peer}: {error}"[:300])
    return pickle.loads(first[_LENGTH_BYTES:] + rest)


def _pass(way: Callable[..., Any], memory: bytearray, peer: int) -> bytearray:
    """Send or receive a block of memory in pieces that gloo takes; nothing if it is empty.

    Through the group itself and not torch.distributed's functions, which know it no more after
    ``destroy_process_group``: a save in the background then still comes to its end.
    """
    if memory:
        for piece in torch.frombuffer(memory, dtype=torch.uint8).split(_MOST_BYTES):
            way([piece], peer, 0).wait()
    return memory

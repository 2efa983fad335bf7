"""``fsdp-sft check``: the checks under the job's own launcher, their table, ``check.json`` and exit code."""

import argparse
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from fsdp_sft._compat.experts import experts_to_place
from fsdp_sft._model.configs import config_of
from fsdp_sft._ranks.agree import agreed, all_gather_objects, share, this_rank, through_rank_0
from fsdp_sft._ranks.init import init_distributed
from fsdp_sft._ranks.words import ranks_named
from fsdp_sft._tensors.disk import full_path, sweep, temporary_beside
from fsdp_sft.check.cluster import Asked, Cluster, make_cluster
from fsdp_sft.check.layers import few_layers
from fsdp_sft.check.mechanism import Check, Trouble
from fsdp_sft.check.raised import Raised
from fsdp_sft.check.results import Finished, is_wrong, ordered, text_of, to_json
from fsdp_sft.check.sequence import all_checks, run_checks
from fsdp_sft.errors import LostRankError, RemoteRankError
from fsdp_sft.jobs.watchdog import Watchdog
from fsdp_sft.jobs.watchdog.report import standing_out
from fsdp_sft.planner.command import in_options
from fsdp_sft.planner.estimate import check_experts
from fsdp_sft.planner.model import build_model

# What ends the checks before their end: a rank that hangs or dies, or a launcher that ends the job.

_TO_HEAR = 10.0  # seconds in which ranks hear of an error by themselves
_TOLD_TO_END = 8.0  # seconds from a launcher's SIGTERM to the end, in which a lost rank is found and named
WRONG = 1


class CheckWatchdog(Watchdog):
    """A watchdog that ends the checks with their table on rank 0, and not with a stack from each rank.

    Args:
        report: Prints what is known; called with why the checks end.
        told: What a rank has raised and others do not know yet; "" without.
        timeout: As for ``Watchdog``.
    """

    def __init__(self, report: Callable[[str], None], told: Callable[[], str], *, timeout: float) -> None:
        super().__init__(timeout=timeout, interval=1.0)
        self._report, self._told = report, told
        self._told_since = math.inf

    def _look(self) -> str:
        """As for ``Watchdog``; also if a rank has raised and the others wait where they do not hear of it."""
        told = self._told()
        self._told_since = min(self._told_since, time.monotonic()) if told else math.inf
        return told if time.monotonic() - self._told_since > _TO_HEAR else super()._look()

    def _announce(self, verdict: str) -> int:
        odd = standing_out(verdict)
        if self._rank in odd:
            super()._announce(verdict)  # with the place at which it stands
        # What the others do is no news: they wait.
        self._report("; ".join(odd.values()) or verdict.splitlines()[0])
        return WRONG

    def _show(self, error: Exception) -> None:
        """Nothing: which rank was lost is in the table, and others need no traceback each."""


@contextmanager
def ended_with_words(report: Callable[[str], None]) -> Iterator[None]:
    """Context in which SIGTERM and SIGINT end the process with ``report``.

    A launcher sends SIGTERM when a rank has died: the checks get some seconds to find out which. ``report``
    is called in a thread, since the main thread may wait in a collective for a rank that is gone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    done = threading.Event()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def watch() -> None:
        while came := ours.recv(1):  # one byte for each signal that Python handles
            if came[0] == signal.SIGINT:
                report("interrupted (SIGINT)")
                os._exit(128 + signal.SIGINT)
            if came[0] == signal.SIGTERM and not done.wait(_TOLD_TO_END):
                report("the launcher has ended the job (SIGTERM): it was cancelled, or another rank has died")
                os._exit(WRONG)

    # A shell starts what runs in the background with SIGINT ignored.
    heard = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]
    before: Any = {one: signal.signal(one, lambda *_: None) for one in heard}
    fd_before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, name="fsdp_sft-check", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(fd_before)
        for one, handler in before.items():
            signal.signal(one, handler)
        theirs.close()  # the thread reads the end of it


_TIMEOUT = timedelta(minutes=10)  # of a collective; the watchdog asks long before
# What the watchdog calls a place, which says less than the check's name.
_PLACE = r",? in step \S+, phase [^:;]+"
_ABANDONED = 3600.0  # seconds after which no check still uses its folder
_BETWEEN = 30.0  # seconds without a sign of a rank, or between two checks, that are allowed


def check(args: argparse.Namespace) -> int:
    """Run the checks and print their table on rank 0.

    Returns:
        The exit code, the same on all ranks that are left: 0 if all is well, 1 if something is wrong.

    Collective: all ranks.
    """
    known = all_checks()
    if args.list:
        print("\n".join(f"{one.name:<12} {one.asks}" for one in known))
        return 0
    chosen = _chosen(known, args.only)
    start = time.perf_counter()
    context = init_distributed(timeout=_TIMEOUT)
    with agreed("reading the arguments of fsdp-sft check"):
        asked = _asked(args, context.world_size)
        if context.is_main:
            _refuse_unwritable(full_path(args.json))
    cluster = make_cluster(context, asked)
    report = _Report(cluster, chosen, start, full_path(args.json))
    try:
        with (
            ended_with_words(report.stopped),
            CheckWatchdog(
                report.stopped, report.raised.told, timeout=_BETWEEN * cluster.crowding
            ) as watchdog,
            _folder(cluster),
        ):
            until = time.perf_counter() + asked.seconds
            done = run_checks(
                cluster,
                chosen,
                watchdog=watchdog,
                tell=report.finished,
                raised=report.raised,
                until=until,
            )
            through_rank_0("writing the results", lambda: None, lambda _: report.end())
    except (LostRankError, RemoteRankError) as error:
        report.stopped(_why(error))
        return WRONG
    return WRONG if is_wrong(done) else 0


def _why(error: LostRankError | RemoteRankError) -> str:
    """Why the checks ended, beginning with the rank that is the reason, if one is known."""
    notes = [note.removeprefix("watchdog: ") for note in getattr(error, "__notes__", [])]
    # A rank that has lost another one is not the reason.
    found = [re.sub(_PLACE, "", note) for note in notes if LostRankError.__name__ not in note]
    lost = re.search(r"\(rank (\d+): ([^)]*)", str(error))
    if lost is not None and not found:
        found = [f"rank {lost[1]} was lost ({lost[2]})"]
    return "; ".join(found).replace(f"{RemoteRankError.__name__}: ", "") or str(error)


class _Report:
    """What is known so far; rank 0 prints it once, whichever thread comes first.

    Args:
        cluster: The ranks.
        chosen: The checks that run.
        start: Time in ``time.perf_counter()`` at which the command began.
        file: The JSON file to write.
    """

    def __init__(self, cluster: Cluster, chosen: list[Check], start: float, file: Path) -> None:
        self._cluster, self._chosen, self._start, self._file = cluster, chosen, start, file
        self._done: list[Finished] = []
        self._lock = threading.Lock()
        self._is_out = False
        self.raised = Raised(cluster)

    def finished(self, one: Finished) -> None:
        """Take note of a check that is done, and say so where a person watches."""
        self._done.append(one)
        if this_rank() == 0 and sys.stderr.isatty():
            print(f"{one.verdict:<4}  {one.check.name}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Print the table and write the file."""
        self._print_once("", ())

    def stopped(self, why: str) -> None:
        """Print and write what is known, and why the checks ended; ranks other than 0 say why alone."""
        why = self.raised.told() or why
        # A sentence that begins with ranks is about those; another may name ranks that only noticed.
        ranks = ranks_named(why) if re.match(r"ranks? \d", why) else ()
        if len(self._done) < len(self._chosen):
            why += f" (in the check {self._chosen[len(self._done)].name})"
        if self._cluster.rank != 0:
            if 0 in ranks:  # which prints no table then
                print(f"rank {self._cluster.rank} of fsdp-sft check: {why}", file=sys.stderr, flush=True)
            return
        if self._cluster.folder is not None:
            shutil.rmtree(self._cluster.folder, ignore_errors=True)  # this process may end at once
        try:
            self._print_once(why, ranks)
        except OSError as error:  # the table is out; the thread that calls this has a process to end
            print(f"{self._file} cannot be written: {error}", file=sys.stderr, flush=True)

    def _print_once(self, why: str, lost: tuple[int, ...]) -> None:
        with self._lock:
            if self._is_out:
                return
            self._is_out = True
        cluster, done, seconds = self._cluster, list(self._done), time.perf_counter() - self._start
        troubles = [trouble for one in done for trouble in one.outcome.troubles]
        if why:
            troubles.insert(0, Trouble("fail", lost, why, leave_out=bool(lost)))
        found = (cluster, done, why.splitlines()[0] if why else "", ordered(troubles), seconds)
        print(text_of(*found), flush=True)
        written = temporary_beside(self._file)
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(to_json(*found), indent=1) + "\n")
        written.replace(self._file)
        print(f"Measured: {self._file}", flush=True)


def _chosen(known: list[Check], only: str | None) -> list[Check]:
    if only is None:
        return known
    names = list(filter(None, map(str.strip, only.split(","))))
    unknown = [name for name in names if name not in {one.name for one in known}]
    if unknown:
        raise ValueError(
            f"--only takes names of checks, and {unknown[0]!r} is none; there are "
            f"{', '.join(one.name for one in known)}"
        )
    return [one for one in known if one.name in names]


def _asked(args: argparse.Namespace, world_size: int) -> Asked:
    """The options as they are given, after what can be looked at alone."""
    for option, value in (("replicas", args.replicas), ("cp", args.cp), ("ep", args.ep)):
        if value < 1 or world_size % value:
            raise ValueError(f"--{option} must divide the {world_size} ranks, got {value}")
    if world_size % (args.replicas * args.cp) or world_size % (args.replicas * args.ep):
        raise ValueError(f"--replicas with --cp or --ep must divide the {world_size} ranks")
    config = None if args.model is None else config_of(args.model)
    try:
        model = build_model(few_layers(config), torch.float32)
    except Exception as error:  # transformers raises any
        raise ValueError(
            f"--model {args.model}: a few layers of it cannot be built as a causal language model "
            f"({error!s:.200}); without --model, layers of our own are checked"
        ) from error
    if args.ep > 1:
        if args.cp > 1:
            raise ValueError(f"--ep {args.ep} goes without --cp: experts are not shared out where rows are")
        with in_options():
            check_experts(experts_to_place(model).values(), model.config.model_type, args.ep)
    return Asked(
        config=config,
        root=None if args.root is None else full_path(args.root),
        replicas=args.replicas,
        cp=args.cp,
        ep_size=args.ep,
        compile=args.compile,
        frozen_dtype=args.frozen,
        seconds=args.seconds,
    )


def _refuse_unwritable(file: Path) -> None:
    """Refuse a file for the results before they are measured, if it cannot be written."""
    written = temporary_beside(file)
    try:
        if file.is_dir():
            raise IsADirectoryError(f"{file} is a folder")
        file.parent.mkdir(parents=True, exist_ok=True)
        written.touch()
        written.unlink()
    except OSError as error:
        raise ValueError(f"--json {file} cannot be written ({error}): give another file") from error


@contextmanager
def _folder(cluster: Cluster) -> Iterator[None]:
    """Context with a folder for the checks' files, below the run's; a temporary one on a single host.

    Collective: all ranks.
    """
    made: list[Path] = []
    problem = ""
    missing: tuple[int, ...] = (0,)
    if cluster.rank == 0:
        try:
            made = _make_folders(cluster)
        except OSError as error:
            problem = f"no folder can be made below {cluster.asked.root} ({error}): take another --root"
    folder, problem = share((made[-1] if made else None, problem))
    if folder is not None:
        missing = tuple(rank for rank, there in enumerate(all_gather_objects(folder.is_dir())) if not there)
        if missing:
            problem = (
                f"{cluster.asked.root} is not there, or is another folder than that of rank 0: mount it on "
                "every node"
            )
    cluster.folder = None if problem else folder
    cluster.folder_problem, cluster.folder_ranks = problem, missing if problem else ()
    try:
        yield
    finally:
        if made:
            shutil.rmtree(made[-1], ignore_errors=True)
        with suppress(OSError):  # somebody else has begun to use it
            for folder in reversed(made[:-1]):
                folder.rmdir()


def _make_folders(cluster: Cluster) -> list[Path]:
    """The folders that were made, the outermost first; the last is for the checks' files."""
    root = cluster.asked.root
    if root is None:
        return [Path(tempfile.mkdtemp(prefix="fsdp-sft-check-"))] if cluster.num_hosts == 1 else []
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    sweep(root / "check", older_than=_ABANDONED)
    own = temporary_beside(root / "check")
    own.mkdir()
    return [*reversed(missing), own]

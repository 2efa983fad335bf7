"""``fsdp-sft check``: the checks under the job's own launcher, their table, ``check.json`` and exit code."""

import argparse
import json
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_sft._model.configs import config_of
from fsdp_sft._process.devices import device_name
from fsdp_sft._ranks.agree import agreed, all_gather_objects, raise_first, share
from fsdp_sft._ranks.init import init_distributed
from fsdp_sft._ranks.mesh import build_mesh
from fsdp_sft._ranks.words import said_ranks
from fsdp_sft._tensors.disk import full_path
from fsdp_sft.check.environment import environment, host_name
from fsdp_sft.check.machines import (
    ACCELERATORS,
    CheckedJob,
    Found,
    Problem,
    folder,
    network,
    products,
    reductions,
)
from fsdp_sft.check.parity import parity, truncated_config
from fsdp_sft.errors import LostRankError, RemoteRankError, abridged, printable
from fsdp_sft.jobs.watchdog import Watchdog

# What names a broken machine comes first.
CHECKS: dict[str, Callable[[CheckedJob], Found]] = {
    one.__name__: one for one in (environment, products, reductions, network, folder, parity)
}
_TIMEOUT = 1200  # seconds that a collective may take
# Seconds after which the watchdog names a rank; compiling takes long.
_SILENCE, _SILENCE_IN_PARITY = 120.0, 900.0
_LEFT_BEHIND = 3600.0  # seconds, in which no check lets its folder be
_WIDTH = 110


@dataclass(frozen=True)
class Done:
    """What a check has found, and its seconds; ``said`` begins with "not seen" if it could see nothing."""

    name: str
    said: str
    problems: list[Problem]
    seconds: float

    @property
    def verdict(self) -> str:
        """``"FAIL"``, ``"warn"``, ``"-"`` for what cannot be seen here, or ``"ok"``."""
        levels = {problem.level for problem in self.problems}
        if levels:
            return "FAIL" if "fail" in levels else "warn"
        return "-" if self.said.startswith("not seen") else "ok"


def check(args: argparse.Namespace) -> int:
    """Run the checks, and print their table on rank 0.

    Returns:
        The exit code, the same on all ranks that are left: 0 if all is well, 1 if something is wrong.

    Collective: all ranks.
    """
    names = list(CHECKS) if args.only is None else [name.strip() for name in args.only.split(",")]
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ValueError(f"--only takes names of checks, and {unknown[0]!r} is none of {', '.join(CHECKS)}")
    context = init_distributed(timeout=_TIMEOUT)
    with agreed("reading the options of fsdp-sft check"):
        config = None if args.model is None else config_of(args.model)
        width = 4096 if context.device.type in ACCELERATORS else 256
        config = truncated_config(config, width=width, ep_size=args.ep)
        if context.is_main:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text("")  # nobody takes an earlier job's for this one's
    job = CheckedJob(
        context,
        all_gather_objects(host_name()),
        mesh=build_mesh(dp_replicate=args.replicas, cp=args.cp, device_type=context.device.type),
        config=config,
        ep_size=args.ep,
        compile=args.compile,
        frozen_dtype=args.frozen,
    )
    done: list[Done] = []
    stopped = ""
    try:
        with Watchdog(timeout=_SILENCE) as watchdog, folder_below(job, args.root):
            for number, name in enumerate(names):
                watchdog.step(number)
                with watchdog.phase(name, timeout=_SILENCE_IN_PARITY if name == "parity" else _SILENCE):
                    done.append(run_check(job, name))
                if context.is_main:  # what is known if the job ends here
                    print(f"{done[-1].verdict:<4}  {name}", file=sys.stderr, flush=True)
    except (LostRankError, RemoteRankError) as error:
        notes = getattr(error, "__notes__", [])
        stopped = f"in the check {names[len(done)]}: {' '.join([*notes, str(error)])}"
        print(f"rank {job.rank}: {stopped}", file=sys.stderr, flush=True)
    problems = ordered([problem for one in done for problem in one.problems], stopped)
    if context.is_main:
        print(text_of(job, done, problems, stopped), flush=True)
        args.json.write_text(json.dumps(to_json(job, done, problems, stopped), indent=1) + "\n")
        print(f"Measured: {args.json}", flush=True)
    return 1 if any(one.level == "fail" for one in problems) else 0


@contextmanager
def folder_below(job: CheckedJob, root: Path | None) -> Iterator[None]:
    """Context with a folder for the checks' files below the run's; a temporary one on a single host.

    Collective: all ranks.
    """
    made = None
    with agreed("making a folder for the checks"):
        if job.rank == 0 and (root is not None or len(set(job.hosts)) == 1):
            if root is not None:
                root.mkdir(parents=True, exist_ok=True)
                _sweep(root)
            made = Path(tempfile.mkdtemp(prefix=".check-", dir=None if root is None else full_path(root)))
    job.folder = share(made)
    try:
        yield
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Remove what checks that were killed have left."""
    for left in root.glob(".check-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT_BEHIND:
                shutil.rmtree(left)


def run_check(job: CheckedJob, name: str) -> Done:
    """What one check says; an error that it raises becomes a problem of the rank that raised it first.

    Raises:
        LostRankError: If a rank has died.
        RemoteRankError: If a rank has left a check that the others are in.

    Collective: all ranks.
    """
    start = time.perf_counter()
    error: Exception | None = None
    said, problems = "", list[Problem]()
    try:
        said, problems = CHECKS[name](job)
    except (LostRankError, RemoteRankError):
        raise
    except Exception as caught:
        error = caught
        text = f"rank {job.rank} on {job.hosts[job.rank]} raised {type(error).__name__}: {error}"
        print(text, file=sys.stderr, flush=True)  # others may wait where they do not hear of it
    try:
        raise_first(error, f"checking {name}")
    except (LostRankError, RemoteRankError):
        raise
    except Exception as first:
        named = re.search(r"rank (\d+) failed first", " ".join(getattr(first, "__notes__", [])))
        ranks = (int(named[1]),) if named else ()
        text = f"raised {type(first).__name__}: {(str(first).splitlines() or [''])[0]}"
        problems = [Problem("fail", ranks, text)]
    return Done(name, said, problems, time.perf_counter() - start)


def ordered(problems: Sequence[Problem], stopped: str = "") -> list[Problem]:
    """Failures before warnings, in the order in which they were found; the same one of several ranks once."""
    merged: dict[tuple[Any, str, bool], set[int]] = {}
    for one in [*([Problem("fail", (), stopped)] if stopped else []), *problems]:
        merged.setdefault((one.level, one.text, one.exclude), set()).update(one.ranks)
    found = [
        Problem(level, tuple(sorted(ranks)), text, exclude)
        for (level, text, exclude), ranks in merged.items()
    ]
    return sorted(found, key=lambda one: one.level != "fail")


def excluded_hosts(job: CheckedJob, problems: Sequence[Problem]) -> list[str]:
    """Nodes without which the job would be well; none if that would be all of them."""
    ranks = {rank for one in problems if one.level == "fail" and one.exclude for rank in one.ranks}
    hosts = job.hosts_of(tuple(ranks))
    return hosts if len(hosts) < len(set(job.hosts)) else []


def text_of(job: CheckedJob, done: Sequence[Done], problems: Sequence[Problem], stopped: str = "") -> str:
    """The table: what is wrong first, each with its ranks and nodes, then a line for each check."""
    return printable("\n".join(_lines(job, done, problems, stopped)))


def _lines(job: CheckedJob, done: Sequence[Done], problems: Sequence[Problem], stopped: str) -> Iterator[str]:
    nodes, context = len(set(job.hosts)), job.context
    where = f"{nodes} nodes" if nodes > 1 else job.hosts[0]
    ranks = f"{context.world_size} rank{'s' * (context.world_size > 1)}"
    yield f"fsdp-sft check: {ranks} on {where}, {context.device.type}, {context.backend}"
    yield ""
    for one in problems:
        whose = (
            f"{said_ranks(one.ranks)} on {abridged(job.hosts_of(one.ranks))}" if one.ranks else "all ranks"
        )
        yield from _wrapped(f"{'FAIL' if one.level == 'fail' else 'warn'}  ", f"{whose}: {one.text}", 6)
    yield from [""] if problems else []
    for row in done:
        head = f"{row.verdict:<4}  {row.name:<11}  {row.seconds:5.1f} s  "
        yield from _wrapped(head, row.said or "see above", len(head))
    yield ""
    failed = [row.name for row in done if row.verdict == "FAIL"]
    unseen = [row.name for row in done if row.verdict == "-"]
    if stopped:
        yield "Something is wrong, and the checks did not come to their end."
    elif failed:
        yield f"Something is wrong: {', '.join(failed)}."
    else:
        warned = f", {len(problems)} warning{'s' * (len(problems) > 1)}" if problems else ""
        yield f"Healthy{warned}{'; not seen here: ' + ', '.join(unseen) if unseen else ''}."
    excluded = excluded_hosts(job, problems)
    if excluded:
        yield f"To leave the node{'s' * (len(excluded) > 1)} out: --exclude={','.join(excluded)}"


def _wrapped(head: str, text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * indent, break_long_words=False
    )


def to_json(
    job: CheckedJob, done: Sequence[Done], problems: Sequence[Problem], stopped: str = ""
) -> dict[str, Any]:
    """The results in JSON types."""
    return {
        "format": "fsdp-sft check 2",
        "healthy": not any(one.level == "fail" for one in problems),
        "world_size": job.context.world_size,
        "hosts": job.hosts,
        "device": device_name(job.device) or job.device.type,
        "backend": job.context.backend,
        "launcher": job.context.launcher,
        "stopped": stopped or None,
        "exclude": excluded_hosts(job, problems),
        "problems": [
            {
                "level": one.level,
                "ranks": list(one.ranks),
                "hosts": job.hosts_of(one.ranks),
                "text": one.text,
            }
            for one in problems
        ],
        "checks": {
            one.name: {"verdict": one.verdict.lower(), "seconds": round(one.seconds, 2), "said": one.said}
            for one in done
        },
        "measured": job.measured,
    }

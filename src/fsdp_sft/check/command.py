"""``fsdp-sft check``: the checks under the job's own launcher, their table, ``check.json`` and exit code."""

import argparse
import json
import re
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_sft._model.configs import config_of
from fsdp_sft._process.devices import device_name
from fsdp_sft._ranks.agree import agreed, all_gather_objects, raise_first, said_ranks, share
from fsdp_sft._ranks.init import init_distributed
from fsdp_sft._ranks.mesh import build_mesh
from fsdp_sft._tensors.disk import full_path
from fsdp_sft.attention.context_parallel import use_context_parallel
from fsdp_sft.check import ACCELERATORS, CheckedJob, Found, Problem, environment, host_name
from fsdp_sft.check.machines import folder, network, products, reductions
from fsdp_sft.check.parity import adapted, parity, truncated_config
from fsdp_sft.errors import LostRankError, RemoteRankError, abridged, printable
from fsdp_sft.jobs.watchdog import Watchdog
from fsdp_sft.shard.apply import shard_model
from fsdp_sft.shard.compile import compile_blocks
from fsdp_sft.weights import build_meta_model, load_weights

# What names a broken machine comes first.
CHECKS: dict[str, Callable[[CheckedJob], Found]] = {
    one.__name__: one for one in (environment, products, reductions, network, folder, parity)
}
_TIMEOUT = 1200  # seconds that a collective may take
# Seconds after which the watchdog names a rank; compiling takes long.
_SILENCE, _SILENCE_IN_PARITY = 120.0, 900.0
_WIDTH = 110


@dataclass(frozen=True)
class Done:
    """What a check has found, and its seconds.

    ``said`` begins with "not seen" if it could see nothing; ``lost`` says that a rank was lost in it.
    """

    name: str
    said: str
    problems: list[Problem]
    seconds: float
    lost: bool = False

    @property
    def verdict(self) -> str:
        """``"FAIL"``, ``"warn"``, ``"-"`` for what cannot be seen here, or ``"ok"``."""
        levels = {problem.level for problem in self.problems}
        if levels:
            return "FAIL" if "fail" in levels else "warn"
        return "-" if self.said.startswith("not seen") else "ok"


class _RankLostError(Exception):
    """A rank was lost in a check, which ends the checks: what it says is in the last ``Done``."""


def check(args: argparse.Namespace) -> int:
    """Run the checks, and print their table on rank 0.

    Returns:
        The exit code, the same on all ranks that are left: 0 if all is well, 1 if something is wrong.

    Collective: all ranks.
    """
    context = init_distributed(timeout=_TIMEOUT)
    with agreed("reading the options of fsdp-sft check"):
        config = truncated_config(
            None if args.model is None else config_of(args.model),
            width=4096 if context.device.type in ACCELERATORS else 256,
            experts_by=args.ep,
        )
        if context.is_main:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text("")  # nobody takes an earlier job's for this one's
    job = CheckedJob(
        context,
        all_gather_objects(host_name()),
        mesh=build_mesh(dp_replicate=args.replicas, cp=args.cp, device_type=context.device.type),
        config=config,
        frozen_dtype=args.frozen,
    )
    job.sharded = partial(sharded_model, job, ep_size=args.ep, compiled=args.compile)
    done: list[Done] = []
    # The watchdog is told of a lost rank too, for it may know which.
    with (
        suppress(_RankLostError),
        Watchdog(timeout=_SILENCE) as watchdog,
        _folder_below(job, args.root),
    ):
        for number, name in enumerate(args.only or CHECKS):
            watchdog.step(number)
            with watchdog.phase(name, timeout=_SILENCE_IN_PARITY if name == "parity" else _SILENCE):
                done.append(run_check(job, name))
            if context.is_main:  # what is known if the job ends here
                print(f"{done[-1].verdict:<4}  {name}", file=sys.stderr, flush=True)
            if done[-1].lost:
                break
        problems = ordered([problem for one in done for problem in one.problems])
        if context.is_main:  # before the watchdog's last look, within which torchrun ends what is left
            print(printable("\n".join(lines_of(job, done, problems))), flush=True)
            args.json.write_text(json.dumps(to_json(job, done, problems), indent=1) + "\n")
            print(f"Measured: {args.json}", flush=True)
        if done[-1].lost:
            raise _RankLostError(done[-1].problems[0].text)
    return 1 if any(one.level == "fail" for one in problems) else 0


def sharded_model(
    job: CheckedJob, source: Path, dtype: torch.dtype, *, ep_size: int = 1, compiled: bool = False
) -> Any:
    """The model of a folder as the job would train it, computing in ``dtype``.

    Collective: all ranks.
    """
    built: Any = build_meta_model(source)
    model = built if job.frozen_dtype is None else adapted(built)
    if compiled:
        compile_blocks(model)
    shard_model(
        model,
        mesh=job.mesh,
        frozen_dtype=torch.bfloat16 if job.frozen_dtype == "bfloat16" else job.frozen_dtype,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        ep_size=ep_size,
    )
    load_weights(model, source)
    use_context_parallel(model, mesh=job.mesh)
    return model.train()


def _folder_below(job: CheckedJob, root: Path | None) -> AbstractContextManager[Any]:
    """Context with a folder for the checks' files below the run's; a temporary one on a single host.

    Collective: all ranks.
    """
    made: AbstractContextManager[Any] = nullcontext()
    with agreed("making a folder for the checks"):
        if job.context.is_main and (root is not None or len(set(job.hosts)) == 1):
            if root is not None:
                root.mkdir(parents=True, exist_ok=True)
            made = tempfile.TemporaryDirectory(
                prefix=".check-", dir=root and full_path(root), ignore_cleanup_errors=True
            )
            job.folder = Path(made.name)
    job.folder = share(job.folder)
    return made


def run_check(job: CheckedJob, name: str) -> Done:
    """What one check says; an error that it raises becomes a problem of the rank that raised it first.

    Collective: all ranks.
    """
    start, lost = time.perf_counter(), False
    said, problems = "", list[Problem]()
    own: Exception | None = None
    try:
        try:
            said, problems = CHECKS[name](job)
        except (LostRankError, RemoteRankError):
            raise
        except Exception as error:
            traceback.print_exc()  # others may wait where they do not hear of it
            own = error
        raise_first(own, f"checking {name}")
    except Exception as error:
        text = f"raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        named = re.search(r"rank (\d+) failed first", " ".join(getattr(error, "__notes__", [])))
        problems = [Problem("fail", (int(named[1]),) if named else (), text)]
        lost = isinstance(error, (LostRankError, RemoteRankError))
    return Done(name, said, problems, time.perf_counter() - start, lost)


def ordered(problems: Sequence[Problem]) -> list[Problem]:
    """Failures before warnings, in the order in which they were found; the same one of several ranks once."""
    merged: dict[tuple[Any, str, bool], set[int]] = {}
    for one in problems:
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


def lines_of(job: CheckedJob, done: Sequence[Done], problems: Sequence[Problem]) -> Iterator[str]:
    """The table: what is wrong first, each with its ranks and nodes, then a line for each check."""
    ranks, hosts = job.context.world_size, abridged(sorted(set(job.hosts)))
    yield f"fsdp-sft check: world size {ranks} on {hosts}, {job.context.device.type}, {job.context.backend}"
    yield ""
    for one in problems:
        whose = (
            f"{said_ranks(one.ranks)} on {abridged(job.hosts_of(one.ranks))}" if one.ranks else "all ranks"
        )
        yield from _wrapped(f"{'FAIL' if one.level == 'fail' else 'warn'}  ", f"{whose}: {one.text}")
    yield from [""] if problems else []
    for row in done:
        yield from _wrapped(
            f"{row.verdict:<4}  {row.name:<11}  {row.seconds:5.1f} s  ", row.said or "see above"
        )
    yield ""
    failed = ", ".join(row.name for row in done if row.verdict == "FAIL")
    yield f"Something is wrong: {failed}." if failed else "Healthy."
    excluded = excluded_hosts(job, problems)
    if excluded:
        yield f"To leave the node{'s' * (len(excluded) > 1)} out: --exclude={','.join(excluded)}"


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False
    )


def to_json(job: CheckedJob, done: Sequence[Done], problems: Sequence[Problem]) -> dict[str, Any]:
    """The results in JSON types."""
    return {
        "format": "fsdp-sft check 2",
        "healthy": not any(one.level == "fail" for one in problems),
        "world_size": job.context.world_size,
        "hosts": job.hosts,
        "device": device_name(job.context.device) or job.context.device.type,
        "backend": job.context.backend,
        "launcher": job.context.launcher,
        "stopped": next((one.name for one in done if one.lost), None),
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

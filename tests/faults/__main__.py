"""Faults against checkpoints, and what was lost.

    python -m tests.faults --kills 300 --flips 1000 --out faults.md

Two gloo ranks on the CPU. ``--points``, ``--damage``, ``--disks``, ``--hostile``, ``--growth`` and
``--machines`` are the parts without a number; without any argument everything runs, about fifteen minutes
on two cores. Disks that are really full or read-only, and shared memory that is, need the right to mount;
without it those rows say so. The exit code is 1 if anything was lost.
"""

import argparse
import collections
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from tests.faults import damage, disks, growth, hostile, jobs, kills, machines, mutated
from tests.faults.kills import Outcome, Trial, is_bad
from tests.faults.tables import counted, table

Rows = tuple[str, int]  # markdown, and how many trials went wrong
PARTS = ("points", "damage", "disks", "hostile", "growth", "machines")


def run_all(trials: Iterable[Trial], root: Path) -> list[tuple[Trial, Outcome]]:
    """Run trials one after the other, with a line for each that is not as it must be."""
    results = []
    for number, trial in enumerate(trials):
        outcome = kills.run_trial(trial, root / "kills")
        results.append((trial, outcome))
        if is_bad(outcome):
            print(f"trial {number}: {trial}: {outcome}", file=sys.stderr, flush=True)
    return results


def random_kills(count: int, root: Path) -> Rows:
    """The section on kills at random moments."""
    started = time.perf_counter()
    results = run_all(kills.random_trials(count), root)
    groups = collections.defaultdict(list)
    for trial, outcome in results:
        key = (
            "all" if trial.everyone else "one",
            "async" if trial.async_ else "sync",
            trial.keep_last,
            trial.again,
        )
        groups[key].append(outcome)
    lines = [
        [who, mode, keep, "yes" if again else "no", len(found), sum(o.inside for o in found)]
        + [sum(o.verdict == verdict for o in found) for verdict in ("exact", "newer", "none due")]
        + [sum(is_bad(o) for o in found)]
        for (who, mode, keep, again), found in sorted(groups.items(), key=str)
    ]
    bad, inside = sum(is_bad(o) for _, o in results), sum(o.inside for _, o in results)
    left = collections.Counter(o.left for _, o in results)
    survivors = collections.Counter(o.survivor for _, o in results)
    head = ["ranks killed", "mode", "keep_last", "unsound step again", "trials", "inside the saving"]
    text = (
        f"## kill -9 at random moments\n\n**{bad} lost in {count} trials**, {inside} of them inside the "
        f"saving; {time.perf_counter() - started:.0f} s. Loaded was the step acknowledged last "
        "(exact), a newer complete one, or nothing was due (none acknowledged yet, or the only one damaged "
        "on purpose).\n\n"
        + table([*head, "exact", "newer", "none due", "lost"], lines)
        + f"\n\nLeft in the folder by the kill: {counted(left)}. Ranks that survived ended with: "
        f"{counted(survivors)} (Barrier: between two saves).\n"
    )
    return text, bad


def named_points(root: Path) -> Rows:
    """The section on kills at named moments."""
    results = run_all(kills.point_trials(), root)
    groups = collections.defaultdict(list)
    for trial, outcome in results:
        groups[trial.point].append(outcome)
    lines = [
        [
            point,
            len(found),
            counted(collections.Counter(o.left for o in found)),
            ", ".join(sorted({str(o.loaded) for o in found})),
            sum(is_bad(o) for o in found),
        ]
        for point, found in groups.items()
    ]
    exported = [kills.run_export_trial(root / "export", everyone) for everyone in (False, True)]
    lines.append(["mid-export", 2, "no folder of that name", "-", sum(told != "exact" for told in exported)])
    bad = sum(is_bad(o) for _, o in results) + sum(told != "exact" for told in exported)
    return (
        "## kill -9 at named moments of saving step 3\n\n"
        f"**{bad} lost in {len(results) + 2} trials**: one and all ranks, synchronous and not.\n\n"
        + table(["moment", "trials", "left behind", "loaded (step, times saved again)", "lost"], lines)
        + "\n"
    ), bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--flips", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--mutations", type=int, default=0, help="changes of a file for each reader")
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--out", type=Path, help="write the report here too")
    args = parser.parse_args()
    numbers = (args.kills, args.flips, args.jobs, args.mutations)
    every = not any((*numbers, *(getattr(args, part) for part in PARTS)))
    parts: list[Callable[[Path], Rows]] = []
    if every or args.kills:
        parts.append(lambda root: random_kills(args.kills or 300, root))
    parts += [named_points] if every or args.points else []
    if every or args.flips:
        parts.append(lambda root: damage.flips(args.flips or 1000, root))
    parts += [damage.damage] if every or args.damage else []
    parts += [disks.disks] if every or args.disks else []
    parts += [hostile.hostile] if every or args.hostile else []
    parts += [growth.growth] if every or args.growth else []
    if every or args.machines:
        parts.append(lambda root: machines.machines(root / "machines"))
    if every or args.mutations:
        parts.append(lambda root: mutated.mutated(args.mutations or 10_000, root))
    if every or args.jobs:
        parts.append(lambda root: jobs.jobs(args.jobs or 100, root))
    texts = [
        "# Faults against checkpoints\n\n"
        f"`python -m tests.faults`, {kills.WORLD_SIZE} gloo ranks on the CPU, "
        f"torch {torch.__version__}, Python {platform.python_version()}.\n"
    ]
    bad = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        for part in parts:
            text, wrong = part(Path(name))
            texts.append(text)
            bad += wrong
            print(text, flush=True)
    if args.out:
        args.out.write_text("\n".join(texts))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

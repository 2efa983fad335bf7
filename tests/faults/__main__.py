"""Faults against checkpoints, and what was lost.

    python -m tests.faults --kills 300 --flips 1000

Two gloo ranks on the CPU. Without any argument everything runs, about fifteen minutes on two cores. Disks
that are really full or read-only need the right to mount; without it those trials say so. A line for each
part, and one for each trial that is not as it must be. The exit code is 1 if there was any.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.faults import damage, disks, hostile, jobs, kills, mutated
from tests.faults.kills import Trial, is_bad
from tests.harness.ranks import run_distributed

Ended = tuple[Counter[str], list[object]]  # how trials ended, and those that are not as they must be


def run_all(trials: Iterable[Trial], root: Path) -> Ended:
    """Kills one after the other."""
    results = [(trial, kills.run_trial(trial, root)) for trial in trials]
    ended = Counter(outcome.verdict for _, outcome in results)
    ended["inside the saving"] = sum(outcome.inside for _, outcome in results)
    return ended, [result for result in results if is_bad(result[1])]


def random_kills(root: Path, number: int) -> Ended:
    """SIGKILL at random moments of saving in a loop."""
    return run_all(kills.random_trials(number), root)


def points(root: Path, number: int) -> Ended:
    """SIGKILL at named moments of saving step 3, and in the middle of an export."""
    ended, wrong = run_all(kills.point_trials(), root)
    exported = [kills.run_export_trial(root / "export", everyone) for everyone in (False, True)]
    ended.update(f"export {told}" for told in exported)
    return ended, [*wrong, *(told for told in exported if told != "exact")]


def flips(root: Path, number: int) -> Ended:
    """Single flipped bits, uniform over all bytes of all files of a step."""
    run_distributed(damage.save, 2, str(root))
    (silent, touched, kinds), _ = run_distributed(damage.flip_jobs, 2, str(root), number, timeout=3600)
    return kinds, [f"{silent} loaded, {touched} touched the live model"] if silent + touched else []


def damages(root: Path, number: int) -> Ended:
    """Truncated, deleted, swapped and stale files."""
    results = damage.damage(root)
    ended = Counter(verdict for _, _, verdict in results)
    return ended, [result for result in results if result[2] not in ("refused", "exact")]


def on_disks(root: Path, number: int) -> Ended:
    """Disks that are full or fail, and a rank that stands still."""
    results = disks.disks(root)
    return Counter(fault for fault, *_ in results), [result for result in results if not result[-1]]


def attacks(root: Path, number: int) -> Ended:
    """Steps that somebody has made to do harm."""
    (results,) = run_distributed(hostile.run_attacks, 1, str(root), timeout=1800)
    ended = Counter(verdict for _, verdict, _, _ in results)
    return ended, [result for result in results if result[1] != "refused"]


def mutations(root: Path, number: int) -> Ended:
    """Files that were changed at random, a number for each reader."""
    (results,) = run_distributed(mutated.run_trials, 1, number, 0, str(root), timeout=7200)
    ended = Counter(outcome for _, outcome, *_ in results)
    return ended, [result for result in results if mutated.is_bad(*result[:2])]


def two_jobs(root: Path, number: int) -> Ended:
    """Two jobs that save below one root."""
    return jobs.jobs(number, root)


# In the order of running: the function, and its number of trials where that is asked for.
PARTS: dict[str, tuple[Callable[[Path, int], Ended], int]] = {
    "kills": (random_kills, 300),
    "points": (points, 1),
    "flips": (flips, 1000),
    "damage": (damages, 1),
    "disks": (on_disks, 1),
    "hostile": (attacks, 1),
    "mutations": (mutations, 10_000),
    "jobs": (two_jobs, 100),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, (part, number) in PARTS.items():
        parser.add_argument(f"--{name}", nargs="?", type=int, const=number, help=part.__doc__)
    asked = {name: number for name, number in vars(parser.parse_args()).items() if number is not None}
    failed = False
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        for name, (part, number) in PARTS.items():
            if asked and name not in asked:
                continue
            folder = Path(root, name)
            folder.mkdir()
            ended, wrong = part(folder, asked.get(name, number))
            told = ", ".join(f"{count} {how}" for how, count in ended.most_common())
            print(f"{name}: {len(wrong)} wrong; {told}", *wrong, sep="\n  ", flush=True)
            failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

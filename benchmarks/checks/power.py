"""Do compositions find what the named tests find? Repairs are undone one at a time.

    python -m benchmarks.checks.power --number 500 --seed 3

Each mistake of ``benchmarks/checks/mistakes`` that undoes a repair is made in a copy of the library, and
compositions are drawn until one is a fault. Printed is the number of draws that it took.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.checks.mistakes import Mistake, checkpoints, loading, meshes, steps
from benchmarks.checks.mutations import ROOT, made


def draws_until_found(mistake: Mistake, number: int, seed: int, workers: int) -> int | None:
    """How many draws it took until one was a fault; None if none was."""
    with made(mistake) as environment, tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log.jsonl"
        options = ["--number", number, "--seed", seed, "--workers", workers, "--log", log]
        command = [sys.executable, "-m", "tests.compositions", "--until-fault", "--no-shrink"]
        subprocess.run([*command, *map(str, options)], cwd=ROOT, env=environment, capture_output=True)
        _, *entries = [json.loads(line) for line in log.read_text().splitlines()]
    faults = [place for place, entry in enumerate(entries, 1) if entry["outcome"][0] == "fault"]
    return faults[0] if faults else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=500, help="most draws for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[""], help="mistakes whose name has one of these in it")
    arguments = parser.parse_args()
    mistakes = [*loading.MISTAKES, *steps.MISTAKES, *meshes.MISTAKES, *checkpoints.MISTAKES]
    chosen = [mistake for mistake in mistakes if any(part in mistake.name for part in arguments.only)]
    found = 0
    for mistake in chosen:
        start = time.monotonic()
        draws = draws_until_found(mistake, arguments.number, arguments.seed, arguments.workers)
        found += draws is not None
        took = f"{draws} draws" if draws else f"not in {arguments.number}"
        print(f"{mistake.name}: {took}, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{found} of {len(chosen)} found")


if __name__ == "__main__":
    main()

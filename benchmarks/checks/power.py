"""Do compositions find what the named tests find? Repairs are undone one at a time.

    python -m benchmarks.checks.power --number 500 --seed 3

Each of these mistakes of ``benchmarks/checks/mistakes`` undoes a repair in a copy of the library, and the
first ``--number`` draws of the seed are judged until one is a fault. To save time only those draws are judged
whose options reach the changed line; the others could at most have found it earlier. Printed is the place of
the draw that found it among all of them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.checks.mistakes import MISTAKES, Mistake
from benchmarks.checks.mutations import ROOT, made

Options = dict[str, str]

# By the name of the mistake: the options without which a draw does not come by it.
REACHED_BY: dict[str, Options] = {
    "buffers of a copied module are left as the memory was": {
        "architecture": "sliding window",
        "adapters": "lora and saved modules",
    },
    "only the base model is accounted for": {"start": "meta", "adapted by": "peft"},
    "tied names compared before a replica has received what it did not read": {
        "stored": "both names of a tie",
        "mesh": "hsdp 2x2",
    },
    "new rows are a mean of what this rank holds": {"vocabulary": "grown", "mesh": "fsdp 2"},
    "every replica's rows count in the mean": {"vocabulary": "grown", "mesh": "hsdp 2x2"},
    "a module kept in float32 drags along what it contains": {
        "architecture": "float32 modules",
        "precision": "bfloat16",
    },
    "entries of a namespace are blocks": {"architecture": "not of transformers"},
    "a count of the caller's own left aside": {"architecture": "classifier"},
    "a router's loss computed by the model and dropped": {"architecture": "moe with router loss"},
    "every micro-batch of the router weighs the same": {"architecture": "moe with router loss"},
    "the keys of batches not compared between ranks": {"twist": "keys differ"},
    "a pack on a model that nobody has verified is trained": {
        "architecture": "convolution",
        "batches": "packed",
    },
    "a pack with a mask is let through": {"batches": "packed with a mask"},
    "ranks of DistributedDataParallel taken for single processes": {"mesh": "torch DDP 2"},
    "hooks on the logits are not looked for": {"twist": "hook on the head"},
    "old steps deleted unasked": {"resume": "same ranks"},
    "an export into a folder that has filled fails": {"export": "into a full folder"},
    "generation does not stop where an answer was taught to end": {"twist": "chat template"},
    "what modules keep in forms of their own is not given back": {
        "twist": "extra state",
        "resume": "same ranks",
    },
    "several optimizers are restored by their place in the list": {
        "optimizer": "muon and adamw",
        "resume": "same ranks",
    },
    "the position counts rows of batches that a data set gives whole": {
        "loader": "sampler of batches",
        "resume": "same ranks",
    },
    "a loop that counts epochs from 0 after a resume goes back": {
        "twist": "set_epoch in the loop",
        "resume": "same ranks",
    },
}


def found_by(mistake: Mistake, where: Options, number: int, seed: int, workers: int) -> tuple[int, int]:
    """(place of the first draw that was a fault, 0 if none was; how many draws were judged)."""
    with made(mistake) as environment, tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log.jsonl"
        options = ["--number", number, "--seed", seed, "--workers", workers, "--log", log]
        command = [sys.executable, "-m", "tests.compositions", "--until-fault", "--no-shrink"]
        # Without those that are compiled: each takes minutes.
        command += ["--where", json.dumps({"compile": "no", **where}), *map(str, options)]
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
        _, *entries = [json.loads(line) for line in log.read_text().splitlines()]
    faults = [entry["number"] + 1 for entry in entries if entry["outcome"][0] == "fault"]
    return min(faults, default=0), len(entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=500, help="most draws for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[""], help="mistakes whose name has one of these in it")
    arguments = parser.parse_args()
    by_name = {mistake.name: mistake for mistake in MISTAKES}
    chosen = [name for name in REACHED_BY if any(part in name for part in arguments.only)]
    found = 0
    for name in chosen:
        start = time.monotonic()
        place, judged = found_by(
            by_name[name], REACHED_BY[name], arguments.number, arguments.seed, arguments.workers
        )
        found += place > 0
        took = f"found by draw {place}" if place else f"not found in {arguments.number}"
        print(f"{name}: {took} ({judged} judged, {time.monotonic() - start:.0f} s)", flush=True)
    print(f"{found} of {len(chosen)} found")


if __name__ == "__main__":
    main()

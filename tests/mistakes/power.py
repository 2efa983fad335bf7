"""Do compositions find what the named tests find? Repairs are undone one at a time.

    python -m tests.mistakes.power --number 500 --seed 3

Each of these mistakes of ``tests/mistakes`` undoes a repair in a copy of the library, and the
``--number`` draws of the seed are judged until one is a fault. To save time only those draws are judged whose
options reach the changed line. Printed is after how many draws each worker found it.

    python -m tests.mistakes.power --programs --number 300 --seed 3

does the same with the programs of ``tests/programs``, for the repairs that concern the order of calls.
"""

import argparse
import json
import subprocess
import sys
import time

from tests.harness.places import ROOT
from tests.mistakes import MISTAKES, Mistake
from tests.mistakes.copies import made

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


# What programs may come by: what cannot be compared, differs between ranks, goes past
# the reduction, changes within a call, is left by a failed step, moves the position, is counted.
BY_PROGRAMS = (
    "a loss that cannot be compared is taken for the cross entropy",
    "ranks step with different options",
    "hooks on parameters that do not run are taken",
    "adapters that are merged are trained or saved once more",
    "what was frozen while it was gathered is trained",
    "gradients of a failed step stay unsharded",
    "an epoch before the one that was restored is trained again",
    "the tokens of a mask that numbers documents are summed up",
)


def found_by(mistake: Mistake, options: list[str]) -> str:
    """What the draws say of a mistake: after how many of them a worker found it, or ""."""
    with made(mistake) as environment:
        command = [sys.executable, "-m", "tests.compositions", "--no-shrink", *options]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("found in ")]
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=500, help="most draws for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[""], help="mistakes whose name has one of these in it")
    parser.add_argument("--programs", action="store_true", help="programs in place of compositions")
    arguments = parser.parse_args()
    by_name = {mistake.name: mistake for mistake in MISTAKES}
    names = BY_PROGRAMS if arguments.programs else tuple(REACHED_BY)
    chosen = [name for name in names if any(part in name for part in arguments.only)]
    common = [f"--number={arguments.number}", f"--seed={arguments.seed}", f"--workers={arguments.workers}"]
    found = 0
    for name in chosen:
        start = time.monotonic()
        # Without those that are compiled: each takes minutes.
        where = ["--where", json.dumps({"compile": "no", **REACHED_BY.get(name, {})})]
        place = found_by(by_name[name], [*common, *(["--programs"] if arguments.programs else where)])
        found += bool(place)
        took = place or f"not found in {arguments.number}"
        print(f"{name}: {took} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{found} of {len(chosen)} found")


if __name__ == "__main__":
    main()

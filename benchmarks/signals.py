"""Signals at random moments of a training job on a real two-node Slurm: does every one end in a sound save?

    python benchmarks/signals.py                 as root, or with Slurm and munge installed

One job of two ranks is struck again and again by scancel -s USR1, scancel -s TERM and scontrol requeue, a
random time after it has gone on. Each time: all ranks exit with 85, the newest checkpoint is sound and of the
last step that ran. At the end: every step ran once, with the losses of an undisturbed run, bit for bit.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests import launches
from tests.slurm_cluster import SlurmCluster, TrainingJob, slurm_cluster

STRIKES = (("scancel", "-s", "USR1"), ("scancel", "-s", "TERM"), ("scontrol", "requeue"))


def strike(job: TrainingJob, number: int, chance: random.Random) -> bool:
    """Signal the job once it has trained on for a random time; whether it saved and left as it should."""
    job.until_step(job.last_step() + 1)
    delay = chance.uniform(0, 3)
    time.sleep(delay)
    command = STRIKES[number % len(STRIKES)]
    started = time.monotonic()
    job.cluster.call(*command, job.id)
    job.cluster.until(lambda: len(job.exit_codes()) > number, 90, "the job does not end")
    seconds = time.monotonic() - started
    last, code = job.last_step(), job.exit_codes()[-1]
    saved = launches.sound_steps(job.folder, ranks=2)
    good = code == 85 and saved[-1] == last
    print(
        f"{number + 1:2}: {' '.join(command):17} after {delay:.2f} s: step {last} ran last, step {saved[-1]} "
        f"is saved, exit code {code}, {seconds:.1f} s{'' if good else '   WRONG'}",
        flush=True,
    )
    return good


def run(cluster: SlurmCluster, folder: Path, args: argparse.Namespace) -> None:
    whole, cut = folder / "whole", folder / "cut"
    cut.mkdir()
    example = [str(launches.EXAMPLE), *launches.arguments(whole, ranks=2, steps=args.steps)]
    launches.run(launches.torchrun(2, "--standalone", *example), timeout=900)
    job = TrainingJob(cluster, cut, nodes=2, ranks=2, steps=args.steps, pace=0.05)
    chance = random.Random(args.seed)
    good = sum(strike(job, number, chance) for number in range(args.signals))
    (ended,) = cluster.wait(job.id, starts=args.signals + 1, timeout=900)
    expected, actual = launches.losses(whole), launches.losses(cut)
    once = [step for step, *_ in actual] == list(range(1, args.steps + 1))
    print(f"{good} of {args.signals} signals: a sound checkpoint of the last step, exit code 85")
    print(f"the job: {ended['JobState']}, {ended['Restarts']} requeues; every step ran once: {once}")
    print(f"losses and gradient norms equal to the undisturbed run's, bit for bit: {actual == expected}")
    if good < args.signals or not once or actual != expected:
        raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--signals", type=int, default=20)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    with slurm_cluster() as cluster, tempfile.TemporaryDirectory() as name:
        run(cluster, Path(name), parser.parse_args())

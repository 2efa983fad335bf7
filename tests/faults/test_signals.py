"""Signals at random moments of a training job on a real two-node Slurm: every one ends in a sound save.

One job of two ranks is struck again and again by scancel -s USR1, scancel -s TERM and scontrol requeue, a
random time after it has gone on. Each time: all ranks exit with 85, the newest checkpoint is sound and of the
last step that ran. At the end: every step ran once, with the losses of an preserved run, bit for bit. Needs
root, or Slurm and munge installed.
"""

import random
import time
from pathlib import Path

import pytest

from tests.harness import launches
from tests.harness.slurm_cluster import TrainingJob, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SIGNALS, STEPS = 20, 900
STRIKES = (("scancel", "-s", "USR1"), ("scancel", "-s", "TERM"), ("scontrol", "requeue"))


def _strike(job: TrainingJob, number: int, chance: random.Random) -> None:
    """Signal the job once it has trained on for a random time: it saves its last step and leaves with 85."""
    job.until_step(job.last_step() + 1)
    delay = chance.uniform(0, 3)
    time.sleep(delay)
    command = STRIKES[number % len(STRIKES)]
    started = time.monotonic()
    job.cluster.call(*command, job.id)
    job.cluster.until(lambda: len(job.exit_codes()) > number, 90, "the job does not end")
    last, code, saved = job.last_step(), job.exit_codes()[-1], launches.sound_steps(job.folder, ranks=2)[-1]
    print(
        f"{number + 1:2}: {' '.join(command):17} after {delay:.2f} s: step {last} ran last, step {saved} "
        f"is saved, exit code {code}, {time.monotonic() - started:.1f} s",
        flush=True,
    )
    assert (code, saved) == (85, last)


def test_every_signal_ends_in_a_sound_save_of_the_last_step(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    cut.mkdir()
    example = [str(launches.EXAMPLE), *launches.arguments(whole, ranks=2, steps=STEPS)]
    launches.run(launches.torchrun(2, "--standalone", *example), timeout=900)
    with slurm_cluster() as cluster:
        job = TrainingJob(cluster, cut, nodes=2, ranks=2, steps=STEPS, pace=0.05)
        chance = random.Random(0)
        for number in range(SIGNALS):
            _strike(job, number, chance)
        (ended,) = cluster.wait(job.id, starts=SIGNALS + 1, timeout=900)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", str(SIGNALS))
    assert [step for step, *_ in launches.losses(cut)] == list(range(1, STEPS + 1)), "every step ran once"
    assert launches.losses(cut) == launches.losses(whole), "losses and norms, bit for bit"

"""kill -9 in mid-training under torchrun: does training go on by itself, and with the same losses?

A random rank of two is killed at a random moment, again and again: torchrun --max-restarts starts both anew,
which go on from the newest checkpoint. At the end each loss and gradient norm must be that of a run that
nothing disturbed, bit for bit, also where a step ran again.
"""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness import launches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = 10
STEPS = 400
SAVE_EVERY = 10


def _children(process: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _train_on(output: Path, agent: subprocess.Popen[bytes]) -> None:
    """Wait until two more steps are logged: the first may be from before a kill."""
    log = output / "log.jsonl"
    before, deadline = len(launches.losses(output)) if log.exists() else 0, time.monotonic() + 300
    while not log.exists() or len(launches.losses(output)) < before + 2:
        if time.monotonic() > deadline or agent.poll() is not None:
            pytest.fail(f"training does not go on after {before} steps")
        time.sleep(0.05)


def test_training_goes_on_by_itself_with_the_same_losses(tmp_path: Path) -> None:
    preserved, output = tmp_path / "preserved", tmp_path / "killed"
    example = [str(launches.EXAMPLE), *launches.arguments(preserved, ranks=2, steps=STEPS)]
    launches.run(launches.torchrun(2, "--standalone", *example), timeout=900)
    options = launches.arguments(output, ranks=2, steps=STEPS, save_every=SAVE_EVERY)
    example = [f"--max-restarts={KILLS}", str(launches.PACED), *options, "--resume", "auto"]
    chance = random.Random(0)
    with (tmp_path / "log").open("w") as text:
        agent = subprocess.Popen(
            launches.torchrun(2, "--standalone", *example),
            env=launches.environment(PACE_SECONDS="0.1"),
            stdout=text,
            stderr=text,
        )
    try:
        for _ in range(KILLS):
            _train_on(output, agent)
            time.sleep(chance.uniform(0, 3))
            os.kill(chance.choice(_children(agent.pid)), signal.SIGKILL)
        assert agent.wait(timeout=600) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        agent.terminate()  # which ends its ranks
        agent.wait()
    assert set(launches.losses(output)) == set(launches.losses(preserved)), "bit for bit"

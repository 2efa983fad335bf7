"""kill -9 in mid-training under torchrun: does training go on by itself, and with the same losses?

Two ranks train under torchrun --max-restarts. First, on one node, a random rank is killed at a random moment,
again and again: torchrun starts all ranks anew, which go on from the newest checkpoint. Then, on two nodes of
one rank each, a whole node is killed, agent and rank; a loop in the shell starts its agent anew, as Slurm
or systemd would, and the agent of the other node waits for it. At the end each loss and gradient norm must be
those of a run that nothing disturbed, bit for bit, also where a step ran again.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness import launches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = 10
STEPS = 400
SAVE_EVERY = 10


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A torchrun agent in a loop that starts it anew until it ends well."""
    # A store that outlives the agents of a restart would hold the addresses of the ranks before.
    environment = launches.environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", PACE_SECONDS="0.1")
    loop = ["bash", "-c", 'until "$@"; do sleep 0.2; done', "loop", *command]
    with log.open("w") as text:
        return subprocess.Popen(loop, env=environment, stdout=text, stderr=text, start_new_session=True)


def _children(process: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(c) for c in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def _below(loop: subprocess.Popen[bytes]) -> list[int]:
    """The running agent, and its ranks behind it."""
    agents = _children(loop.pid)
    return [*agents, *(rank for agent in agents for rank in _children(agent))]


def _train_on(output: Path, loops: list[subprocess.Popen[bytes]]) -> None:
    """Wait until two more steps are logged: the first may be from before a kill."""
    log = output / "log.jsonl"
    before, deadline = len(launches.losses(output)) if log.exists() else 0, time.monotonic() + 300
    while not log.exists() or len(launches.losses(output)) < before + 2:
        if time.monotonic() > deadline or all(loop.poll() is not None for loop in loops):
            pytest.fail(f"training does not go on after {before} steps")
        time.sleep(0.05)


@pytest.fixture(scope="module")
def preserved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("preserved")
    example = [str(launches.EXAMPLE), *launches.arguments(output, ranks=2, steps=STEPS)]
    launches.run(launches.torchrun(2, "--standalone", *example), timeout=900)
    return output


def _commands(kind: str, output: Path) -> list[list[str]]:
    """One torchrun of two ranks, or two of one rank each that meet over a port."""
    options = launches.arguments(output, ranks=2, steps=STEPS, save_every=SAVE_EVERY)
    example = [f"--max-restarts={KILLS}", str(launches.PACED), *options, "--resume", "auto"]
    if kind == "rank":
        return [launches.torchrun(2, "--standalone", *example)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x")
    hosts = [f"--rdzv-conf=is_host={1 - node}" for node in (0, 1)]
    return [launches.torchrun(1, *meeting, host, *example) for host in hosts]


@pytest.mark.parametrize("kind", ["rank", "node"])
def test_training_goes_on_by_itself_with_the_same_losses(kind: str, preserved: Path, tmp_path: Path) -> None:
    output = tmp_path / kind
    output.mkdir()
    loops = [_start(command, tmp_path / f"{n}.log") for n, command in enumerate(_commands(kind, output))]
    chance = random.Random(0)
    try:
        for _ in range(KILLS):
            _train_on(output, loops)
            time.sleep(chance.uniform(0, 3))
            agent, *ranks = _below(chance.choice(loops))
            for victim in [chance.choice(ranks)] if kind == "rank" else [agent, *ranks]:
                os.kill(victim, signal.SIGKILL)
        codes = [loop.wait(timeout=600) for loop in loops]
    finally:
        for loop in loops:
            below = _below(loop)
            loop.kill()
            for process in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            loop.wait()
    assert not any(codes), "\n".join(path.read_text()[-3000:] for path in tmp_path.glob("*.log"))
    assert set(launches.losses(output)) == set(launches.losses(preserved)), "bit for bit"

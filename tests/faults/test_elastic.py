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


class Node:
    """A torchrun agent in a loop that starts it anew until it ends well, and the processes below it."""

    def __init__(self, command: list[str], log: Path) -> None:
        loop = ["bash", "-c", 'until "$@"; do sleep 0.2; done', "loop", *command]
        with log.open("w") as text:
            self.loop = subprocess.Popen(
                loop,
                # A store that outlives the agents of a restart would hold the addresses of the ranks before.
                env=launches.environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", PACE_SECONDS="0.1"),
                stdout=text,
                stderr=text,
                start_new_session=True,
            )

    def agent(self) -> int:
        """The running agent; 0 between two."""
        return next(iter(_children(self.loop.pid)), 0)

    def ranks(self) -> list[int]:
        """The running training processes, by local rank."""
        return _children(self.agent()) if self.agent() else []

    def stop(self) -> None:
        """Kill the loop and all below it."""
        below = [self.loop.pid, self.agent(), *self.ranks()]
        for process in filter(None, below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.loop.wait()


def _children(process: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(c) for c in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def _newest_step(output: Path) -> tuple[int, int]:
    """(lines in the log, newest step); the lines tell a step that runs again from one that has not yet."""
    logged = launches.losses(output) if (output / "log.jsonl").exists() else []
    return len(logged), logged[-1][0] if logged else 0


def _train_on(output: Path, lines: int, nodes: list[Node], timeout: float = 300) -> None:
    """Wait until more steps are logged than ``lines``."""
    deadline = time.monotonic() + timeout
    while _newest_step(output)[0] <= lines:
        if time.monotonic() > deadline or all(node.loop.poll() is not None for node in nodes):
            pytest.fail(f"training does not go on after {lines} steps")
        time.sleep(0.05)


def _kill_rank(nodes: list[Node], chance: random.Random) -> str:
    ranks = nodes[0].ranks()
    victim = chance.randrange(len(ranks))
    os.kill(ranks[victim], signal.SIGKILL)
    return f"rank {victim}"


def _kill_node(nodes: list[Node], chance: random.Random) -> str:
    victim = chance.randrange(len(nodes))
    for process in [nodes[victim].agent(), *nodes[victim].ranks()]:
        os.kill(process, signal.SIGKILL)
    return f"node {victim}"


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
    nodes = [Node(command, tmp_path / f"{n}.log") for n, command in enumerate(_commands(kind, output))]
    chance = random.Random(0)
    try:
        for number in range(1, KILLS + 1):
            _train_on(output, _newest_step(output)[0] + 1, nodes)
            time.sleep(chance.uniform(0, 3))
            lines, step = _newest_step(output)
            victim = (_kill_rank if kind == "rank" else _kill_node)(nodes, chance)
            killed = time.monotonic()
            _train_on(output, _newest_step(output)[0] + 1, nodes)
            print(
                f"{number:2}: killed {victim} after step {step} (line {lines}), training goes on "
                f"{time.monotonic() - killed:.1f} s later at step {_newest_step(output)[1]}",
                flush=True,
            )
        codes = [node.loop.wait(timeout=600) for node in nodes]
    finally:
        for node in nodes:
            node.stop()
    print(f"{kind}: ended with {codes}; {len(launches.losses(output))} steps ran, {STEPS} of them new")
    assert not any(codes), "\n".join((tmp_path / f"{n}.log").read_text()[-3000:] for n in range(len(nodes)))
    assert set(launches.losses(output)) == set(launches.losses(preserved)), "bit for bit"

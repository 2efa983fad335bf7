"""kill -9 in mid-training under torchrun: does training go on by itself, and with the same losses?

    python benchmarks/elastic.py

Two ranks train under torchrun --max-restarts. First, on one node, a random rank is killed at a random moment,
again and again: torchrun starts all ranks anew, which go on from the newest checkpoint. Then, on two nodes of
one rank each, a whole node is killed, agent and rank; a loop in the shell starts its agent anew, as Slurm
or systemd would, and the agent of the other node waits for it. At the end each loss and gradient norm must be
those of a run that nothing disturbed, bit for bit, also where a step ran again.
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests import launches

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
            raise SystemExit(f"training does not go on after {lines} steps")
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


def trials(kind: str, number: int, whole: Path, folder: Path, args: argparse.Namespace) -> int:
    """Kill ``number`` times in one run, to its end; how many times training went on by itself."""
    output = folder / kind
    output.mkdir()
    options = launches.arguments(output, ranks=2, steps=args.steps, save_every=SAVE_EVERY)
    example = [str(launches.PACED), *options, "--resume", "auto"]
    restarts = f"--max-restarts={number}"
    if kind == "rank":
        commands = [launches.torchrun(2, "--standalone", restarts, *example)]
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        meeting = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x")
        hosts = [f"--rdzv-conf=is_host={1 - node}" for node in (0, 1)]
        commands = [launches.torchrun(1, *meeting, host, restarts, *example) for host in hosts]
    nodes = [Node(command, folder / f"{kind}-{n}.log") for n, command in enumerate(commands)]
    chance = random.Random(args.seed)
    went_on = 0
    try:
        for trial in range(number):
            _train_on(output, _newest_step(output)[0] + 1, nodes)
            time.sleep(chance.uniform(0, 3))
            lines, step = _newest_step(output)
            victim = (_kill_rank if kind == "rank" else _kill_node)(nodes, chance)
            killed = time.monotonic()
            _train_on(output, _newest_step(output)[0] + 1, nodes)
            went_on += 1
            print(
                f"{trial + 1:2}: killed {victim} after step {step} (line {lines}), training goes on "
                f"{time.monotonic() - killed:.1f} s later at step {_newest_step(output)[1]}",
                flush=True,
            )
        codes = [node.loop.wait(timeout=600) for node in nodes]
    except BaseException:
        for n in range(len(nodes)):
            print((folder / f"{kind}-{n}.log").read_text()[-3000:])
        raise
    finally:
        for node in nodes:
            node.stop()
    expected, actual = set(launches.losses(whole)), set(launches.losses(output))
    print(f"{kind}: ended with {codes}; {len(launches.losses(output))} steps ran, {args.steps} of them new")
    print(f"{kind}: all losses and gradient norms those of the undisturbed run: {actual == expected}")
    if any(codes) or actual != expected:
        raise SystemExit(1)
    return went_on


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=10, help="of each kind")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        example = [str(launches.EXAMPLE), *launches.arguments(folder / "whole", ranks=2, steps=args.steps)]
        launches.run(launches.torchrun(2, "--standalone", *example), timeout=900)
        went_on = sum(trials(kind, args.trials, folder / "whole", folder, args) for kind in ("rank", "node"))
    print(f"{went_on} of {2 * args.trials} kills: training went on by itself")


if __name__ == "__main__":
    main()

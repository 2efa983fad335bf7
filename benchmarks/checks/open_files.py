"""A job of 24 ranks that may have few files open: works, or says what it needs, within seconds.

    python -m benchmarks.checks.open_files [--ranks 24] [--output FILE]

Each rank lowers its own hard limit before it joins, then trains nothing: it saves, saves asynchronously,
loads what was saved, and says what it met. What was acknowledged is looked at by a process without limit.
"""

import argparse
import collections
import contextlib
import os
import queue
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import fsdp_sft as fs
from benchmarks.tables import publish, table

LIMITS = (48, 64, 96, 128, 256)
_PATIENCE = 120  # seconds after which a rank counts as hanging


def _job(rank: int, world: int, limit: int, folder: str, port: int, met: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    started, doing = time.perf_counter(), "joining"
    acknowledged = 0
    try:
        fs.init_distributed(device_type="cpu")
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
        fs.shard_model(
            model,
            mesh=fs.build_mesh(device_type="cpu"),
            blocks={str(at): block for at, block in enumerate(model)},
        )
        optimizer = torch.optim.AdamW(model.parameters())
        doing = "saving"
        fs.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
        acknowledged, doing = 1, "saving asynchronously"
        fs.save_checkpoint(folder, step=2, model=model, optimizer=optimizer, async_=True).wait()
        acknowledged = 2
        doing = "loading"
        fs.load_checkpoint(folder, model=model, optimizer=optimizer)
        said = "works"
    except Exception as error:
        said = f"{doing}: {type(error).__name__}: {str(error).splitlines()[0]}"
    met.put((rank, said, acknowledged, time.perf_counter() - started))


def run(world: int, limit: int, folder: Path) -> list[str]:
    """One row of the table."""
    context = mp.get_context("spawn")
    met = context.Queue()
    port = 20000 + os.getpid() % 20000
    arguments = [(rank, world, limit, str(folder), port, met) for rank in range(world)]
    ranks = [context.Process(target=_job, args=each) for each in arguments]
    for process in ranks:
        process.start()
    found = []
    with contextlib.suppress(queue.Empty):  # the table says how many never answered
        found.extend(met.get(timeout=_PATIENCE) for _ in ranks)
    for process in ranks:
        process.join(timeout=10)
        process.kill()
    said = collections.Counter(text for _, text, _, _ in found)
    acknowledged = max((step for _, _, step, _ in found), default=0)
    sound = [found.step for found in fs.find_checkpoints(folder) if found.sound] if folder.is_dir() else []
    lost = [step for step in range(1, acknowledged + 1) if step not in sound]
    slowest = max((seconds for _, _, _, seconds in found), default=0.0)
    outcome = "; ".join(f"{count} ranks: {text}" for text, count in said.most_common())
    return [str(limit), outcome, str(world - len(found)), f"{slowest:.1f}", str(len(lost))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=24)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for limit in LIMITS:
        with tempfile.TemporaryDirectory() as name:
            rows.append(run(options.ranks, limit, Path(name) / "checkpoints"))
    header = ["limit", "what the ranks met", "ranks that hung", "slowest, s", "acknowledged steps lost"]
    publish(f"{options.ranks} ranks that may open few files", table(header, rows), options.output)


if __name__ == "__main__":
    main()

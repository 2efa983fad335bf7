"""What the machines of a job fetch from storage to load a checkpoint, and how long slow storage takes.

    python -m benchmarks.checks.shared_reads [--output FILE]
    python -m benchmarks.checks.shared_reads --throttle 200     # MB/s; as root, with cgroups of version 1

Four machines with two ranks each are eight processes on this one, every two of them with a copy of the
checkpoint, that is with a page cache, of their own; the copies are put out of the cache first. What was
fetched is what the system says each process has had read from storage (``read_bytes`` of /proc/self/io).
The throttle holds all of the job together, as a shared file system would.
"""

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fsdp_sft as fs
from benchmarks.speed.load import make_checkpoint
from benchmarks.tables import publish, table
from fsdp_sft.weights import build_meta_model, load_weights

NODES, PER_NODE = 4, 2
_CGROUP = Path("/sys/fs/cgroup/blkio")


def _fetched() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _rank(
    rank: int, folders: list[Path], replicas: int, read_ahead: bool, cgroup: Path | None, out: str
) -> None:
    world = NODES * PER_NODE
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    if read_ahead:  # as it was without the advice
        import fsdp_sft._tensors.reader as read

        read.advise = lambda *_: None
    torch.set_num_threads(1)
    fs.init_distributed(device_type="cpu")
    folder = folders[rank // PER_NODE]
    model = build_meta_model(folder)
    fs.shard_model(model, mesh=fs.build_mesh(device_type="cpu", dp_replicate=replicas))
    dist.barrier()
    _drop_from_cache(folder)
    dist.barrier()
    before = _fetched()
    report = load_weights(model, folder)
    own = {"fetched": _fetched() - before, "asked": report.bytes_read, "seconds": report.seconds}
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, own)
    if rank == 0:
        torch.save(everyone, out)
    dist.destroy_process_group()


def measure(folders: list[Path], replicas: int, *, read_ahead: bool, cgroup: Path | None) -> dict[str, Any]:
    """Sums by node, and the slowest rank's time."""
    with tempfile.TemporaryDirectory() as name:
        out = str(Path(name) / "ranks.pt")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29500 + os.getpid() % 1000))
        mp.spawn(_rank, args=(folders, replicas, read_ahead, cgroup, out), nprocs=NODES * PER_NODE)
        ranks = torch.load(out)
    nodes = [ranks[at : at + PER_NODE] for at in range(0, len(ranks), PER_NODE)]
    return {
        "fetched": [sum(rank["fetched"] for rank in node) for node in nodes],
        "asked": [sum(rank["asked"] for rank in node) for node in nodes],
        "seconds": max(rank["seconds"] for rank in ranks),
    }


def _throttle(device: int, megabytes: int) -> Path:
    cgroup = _CGROUP / f"shared-reads-{os.getpid()}"
    cgroup.mkdir()
    limit = f"{os.major(device)}:{os.minor(device)} {megabytes * 1_000_000}"
    (cgroup / "blkio.throttle.read_bps_device").write_text(limit)
    return cgroup


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--throttle", type=int, help="MB/s for the whole job")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / f"node{index}" for index in range(NODES)]
        make_checkpoint(folders[0], hidden=1536, layers=14)
        for folder in folders[1:]:
            shutil.copytree(folders[0], folder)
        total = sum(path.stat().st_size for path in folders[0].glob("*.safetensors"))
        cgroup = None
        if options.throttle:
            cgroup = _throttle(folders[0].stat().st_dev, options.throttle)
        rows = []
        for label, replicas, read_ahead in (
            ("FSDP over 8", 1, False),
            ("HSDP, 4 replicas", 4, False),
            ("FSDP over 8, without advice", 1, True),
            ("HSDP, 4 replicas, without advice", 4, True),
        ):
            found = [
                measure(folders, replicas, read_ahead=read_ahead, cgroup=cgroup)
                for _ in range(options.rounds)
            ]
            fetched = [sum(each["fetched"]) / sum(each["asked"]) for each in found]
            worst = [max(each["fetched"]) / total for each in found]
            seconds = statistics.median(each["seconds"] for each in found)
            row = [
                label,
                f"{sum(found[0]['asked']) / total:.3f}",
                f"{statistics.median(fetched):.3f}",
                f"{statistics.median(worst):.3f}",
                f"{seconds:.2f}",
            ]
            if options.throttle:
                row.append(f"{seconds / (total / options.throttle / 1e6):.2f}")
            rows.append(row)
        if cgroup is not None:
            cgroup.rmdir()
    header = ["", "asked for / files", "fetched / asked for", "busiest machine, of the files", "seconds"]
    header += [f"x files at {options.throttle} MB/s"] if options.throttle else []
    text = f"{total / 1e9:.2f} GB, {NODES} machines x {PER_NODE} ranks, median of {options.rounds}"
    publish("What machines fetch to load a checkpoint", [text, "", *table(header, rows)], options.output)


if __name__ == "__main__":
    main()

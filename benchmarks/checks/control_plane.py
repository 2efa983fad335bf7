"""Sockets, messages and bytes of each rank, and what they would be in a job of a thousand.

    python -m benchmarks.checks.control_plane [--output FILE]

Real gloo ranks of a tiny model on this machine. What a rank sends is asked of the kernel (``TCP_INFO`` of
each of its sockets): segments with data, and their bytes.
"""

import argparse
import math
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fsdp_sft as fs
from benchmarks.tables import publish, table
from fsdp_sft._ranks import agree

SIZES = (2, 4, 8, 16, 24)
BY_STORE = ("init", "async save")
# struct tcp_info of <linux/tcp.h>: bytes sent, and segments with data in them that were sent
_BYTES_SENT, _DATA_SEGMENTS = (200, "<Q"), (156, "<I")


def sockets() -> list[int]:
    """Descriptors of this process that are sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            pass
    return found


def sent() -> tuple[int, int]:
    """Segments with data, and bytes, that the TCP sockets of this process have sent so far."""
    segments = size = 0
    for fd in sockets():
        try:
            own = socket.socket(fileno=os.dup(fd))
        except OSError:  # another thread has closed it meanwhile
            continue
        with own:
            if own.type != socket.SOCK_STREAM or own.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) >= 208:
                segments += struct.unpack_from(_DATA_SEGMENTS[1], info, _DATA_SEGMENTS[0])[0]
                size += struct.unpack_from(_BYTES_SENT[1], info, _BYTES_SENT[0])[0]
    return segments, size


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24)))


def _rank(rank: int, world_size: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    found: dict[str, tuple[int, int, int]] = {}

    def note(name: str, action: Callable[[], Any]) -> None:
        before = sent()
        action()
        time.sleep(0.2)  # what the others send is on its way
        after = sent()
        found[name] = (len(sockets()), after[0] - before[0], after[1] - before[1])

    note("init", lambda: fs.init_distributed(device_type="cpu"))
    model = _model()
    fs.shard_model(model, mesh=fs.build_mesh(device_type="cpu"), blocks=dict(model.named_children()))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    fs.save_checkpoint(folder, 0, model=model, optimizer=optimizer)  # what is made on first use
    note("verdict", lambda: agree.raise_first(None, "counting"))
    note("sum", lambda: agree.all_reduce_sum([1.0] * 4))
    note("gather", lambda: agree.all_gather_objects(None))
    numbers, values = torch.zeros(32, dtype=torch.int64), [None] * world_size
    group = agree.control_group()
    dist.all_reduce(numbers, group=group)  # connects what its ring needs
    note("32 numbers, torch's all_reduce", lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX, group))
    note("32 numbers", lambda: agree.all_reduce_sum([0.1] * 32))
    note("gather, torch's all_gather_object", lambda: dist.all_gather_object(values, None, group))
    note("save", lambda: fs.save_checkpoint(folder, 1, model=model, optimizer=optimizer))
    note(
        "async save",
        lambda: fs.save_checkpoint(folder, 2, model=model, optimizer=optimizer, async_=True).wait(),
    )
    with fs.Watchdog(timeout=5) as watchdog, watchdog.phase("idle", timeout=math.inf):
        time.sleep(1.5)  # everybody has been heard of
        note("watchdog, 20 looks", lambda: time.sleep(10))
    note("load", lambda: fs.load_checkpoint(folder, model=model, optimizer=optimizer))
    torch.save(found, f"{folder}/found-{rank}")
    agree.all_gather_objects(None)
    if rank == 0:
        time.sleep(2)  # the store of the group ends with this process, and the others may still need it
    dist.destroy_process_group()


def counted(world_size: int) -> list[dict[str, tuple[int, int, int]]]:
    """Of each rank, what it did to (sockets afterwards, segments sent, bytes sent)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world_size, port, folder), nprocs=world_size, start_method="fork")
        return [torch.load(Path(folder) / f"found-{rank}") for rank in range(world_size)]


def exponent(sizes: list[int], values: list[float]) -> float:
    """Of the power of N that fits best, by least squares of the logarithms."""
    xs, ys = [math.log(n) for n in sizes], [math.log(max(value, 1e-9)) for value in values]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    over = sum((a - x) ** 2 for a in xs)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / over


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    by_size = {size: counted(size) for size in options.sizes}
    largest = max(by_size)
    columns = [f"N = {size}: mean (busiest)" for size in by_size]
    head = ["", *columns, "exponent of the mean, N > 2", "at 1,000"]
    sections = [
        "torch's collectives, which the library does not use for this, are beside its own: rings, whose "
        "messages and bytes a rank grow with N. "
        "N - 1 edges of a tree are used once up and once down, so the mean over ranks is a constant times "
        "(N - 1) / N: half of it at N = 2, all of it in a large job. At 1,000 ranks: the mean by that rule. "
        "The busiest: messages by log2 N, but by N where the host of the store answers every rank (a start, "
        "and the first asynchronous save, which makes a group); sockets and bytes by N, an upper bound.",
        "",
    ]
    for number, what in enumerate(("sockets", "messages", "bytes")):
        rows = []
        for name in next(iter(by_size.values()))[0]:
            values = {size: [rank[name][number] for rank in ranks] for size, ranks in by_size.items()}
            means = {size: sum(of) / size for size, of in values.items()}
            cells = [f"{means[size]:.1f} ({max(of)})" for size, of in values.items()]
            by_log = what == "messages" and name not in BY_STORE and "torch's" not in name
            growth = math.log2(1000) / math.log2(largest) if by_log else 1000 / largest
            of_mean = 1000 / largest if "torch's" in name else 0.999 / (1 - 1 / largest)
            mean, most = means[largest] * of_mean, max(values[largest]) * growth
            above = {size: of for size, of in means.items() if size > 2}
            fitted = exponent(list(above), list(above.values()))
            rows.append([name, *cells, f"{fitted:.2f}", f"{mean:.1f} ({most:.0f})"])
        sections += [f"## {what.capitalize()} of a rank", "", *table(head, rows), ""]
    publish("What a rank sends to agree, save and load", sections, options.output)


if __name__ == "__main__":
    main()

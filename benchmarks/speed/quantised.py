r"""Bytes, seconds and memory of a load from each quantised format, beside the same model in bfloat16.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.speed.quantised \
        --output quantised.md

The weights are random. Ratios are medians over rounds, in each of which every format is loaded once: through
a reader that all ranks together may read 500 MB/s with, as from a file system that many share, and at the
machine's own speed from a warm cache. Memory is what one process takes at its peak, beyond the weights.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import fsdp_sft as fs
from benchmarks.host_memory import PeakMemory
from benchmarks.speed.load import have_memory_ready, make_checkpoint, rank, world
from benchmarks.tables import publish, table
from fsdp_sft._tensors import reader

LIMIT = 500e6  # bytes a second, of all ranks together
Packed = tuple[dict[str, torch.Tensor], dict[str, Any]]


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 120, shape, dtype=torch.uint8)


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64).to(torch.int32)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def fp8(rows: int, columns: int) -> Packed:
    tensors = {
        ".weight": _bytes(rows, columns).view(torch.float8_e4m3fn),
        ".weight_scale_inv": torch.rand(-(-rows // 128), -(-columns // 128)),
    }
    return tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]}


def mxfp4(rows: int, columns: int) -> Packed:
    tensors = {".weight_packed": _bytes(rows, columns // 2), ".weight_scale": _bytes(rows, columns // 32)}
    return tensors, _compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
    )


def nvfp4(rows: int, columns: int) -> Packed:
    tensors = {
        ".weight": _bytes(rows, columns // 2),
        ".weight_scale": _bytes(rows, columns // 16).view(torch.float8_e4m3fn),
        ".weight_scale_2": torch.rand(()),
    }
    return tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def int4(rows: int, columns: int) -> Packed:
    tensors = {
        ".weight_packed": _words(rows, columns // 8),
        ".weight_scale": torch.rand(rows, columns // 32).bfloat16(),
        ".weight_shape": torch.tensor([rows, columns]),
    }
    return tensors, _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)


def nf4(rows: int, columns: int) -> Packed:
    blocks = rows * columns // 64
    state = {"shape": [rows, columns], "blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.01}
    tensors = {
        ".weight": _bytes(rows * columns // 2, 1),
        ".weight.absmax": _bytes(blocks),
        ".weight.quant_map": torch.linspace(-1, 1, 16),
        ".weight.nested_absmax": torch.rand(-(-blocks // 256)),
        ".weight.nested_quant_map": torch.linspace(-1, 1, 256),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    return tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True}


FORMATS: dict[str, Callable[[int, int], Packed]] = {
    "FP8, blocks of 128 x 128": fp8,
    "MXFP4": mxfp4,
    "NVFP4": nvfp4,
    "INT4, groups of 32": int4,
    "NF4, nested": nf4,
}


def folders(root: Path, hidden: int, layers: int) -> dict[str, Path]:
    """The model in bfloat16, and in each format; all that is no linear layer stays in bfloat16."""
    every = {"bfloat16": root / "bf16"} | {name: root / name.replace(" ", "-") for name in FORMATS}
    if rank() == 0 and not (root / "done").exists():
        make_checkpoint(every["bfloat16"], hidden=hidden, layers=layers, vocab=4096)
        tensors = {
            k: t for path in every["bfloat16"].glob("*.safetensors") for k, t in load_file(path).items()
        }
        config = json.loads((every["bfloat16"] / "config.json").read_text())
        for name, make in FORMATS.items():
            stored, settings = {}, {}
            for key, tensor in tensors.items():
                if "_proj" not in key:
                    stored[key] = tensor
                    continue
                packed, settings = make(*tensor.shape)
                stored |= {key.removesuffix(".weight") + end: part for end, part in packed.items()}
            every[name].mkdir()
            save_file(stored, every[name] / "model.safetensors", metadata={"format": "pt"})
            (every[name] / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        (root / "done").touch()
    dist.barrier()
    return every


@contextmanager
def limited() -> Iterator[None]:
    """A block in which this rank reads no faster than its share of the limit."""
    plain, started, taken = reader.read_at, time.perf_counter(), 0

    def slowed(fd: int, start: int, memory: memoryview) -> None:
        nonlocal taken
        plain(fd, start, memory)
        taken += memory.nbytes
        time.sleep(max(0.0, taken / (LIMIT / world()) - (time.perf_counter() - started)))

    reader.read_at = slowed
    try:
        yield
    finally:
        reader.read_at = plain


def load(folder: Path, mesh: Any) -> tuple[float, int]:
    """(seconds of the slowest rank, bytes that all ranks read)."""
    model = fs.build_meta_model(folder)
    fs.shard_model(model, mesh=mesh)
    gc.collect()
    dist.barrier()
    started = time.perf_counter()
    report = fs.load_weights(model, folder)
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item(), report.job_bytes_read


def _beyond(folder: Path) -> int:
    """Bytes of memory that a load takes beyond the weights, in a process that has loaded nothing before."""
    torch.set_num_threads(1)
    model = fs.build_meta_model(folder)
    gc.collect()
    with PeakMemory() as peak:
        fs.load_weights(model, folder)
    return peak.grown - sum(p.numel() * 4 for p in model.parameters())


def measure(every: dict[str, Path], rounds: int) -> list[str]:
    mesh = fs.build_mesh(device_type="cpu")
    times: dict[tuple[str, bool], list[float]] = {
        (name, slow): [] for name in every for slow in (True, False)
    }
    read: dict[str, int] = {}
    for number in range(rounds + 1):
        for slow in (True, False):
            for name, folder in every.items():
                have_memory_ready(every["bfloat16"])
                if slow:
                    with limited():
                        seconds, read[name] = load(folder, mesh)
                else:
                    seconds, read[name] = load(folder, mesh)
                if number:
                    times[name, slow].append(seconds)

    def ratio(name: str, slow: bool) -> str:
        pairs = zip(times[name, slow], times["bfloat16", slow], strict=True)
        return f"{statistics.median(a / b for a, b in pairs):.2f}"

    whole, beyond = read["bfloat16"], dict.fromkeys(every, 0)
    if rank() == 0:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
            beyond = dict(zip(every, pool.map(_beyond, every.values()), strict=True))
    rows = [
        (
            name,
            f"{read[name] / 1e6:.0f}",
            f"{read[name] / whole:.3f}",
            f"{statistics.median(times[name, True]):.2f}",
            ratio(name, True),
            f"{statistics.median(times[name, False]):.2f}",
            ratio(name, False),
            f"{beyond[name] / 2**20:.0f}",
        )
        for name in every
    ]
    head = (
        "format",
        "MB read",
        "x bf16",
        "s at 500 MB/s",
        "x bf16",
        "s, not limited",
        "x bf16",
        "MiB beyond weights",
    )
    return [
        f"{world()} ranks on 2 cores, one thread each, {rounds} rounds, float32 shards, "
        f"torch {torch.__version__}. Linear layers are quantised, embeddings and head "
        f"({2 * 4096 / (2 * 4096 + 22_800 * 8):.0%} of all weights) are not.",
        "",
        *table(head, rows),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fsdp-sft-quantised")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fs.init_distributed(device_type="cpu")
    lines = measure(folders(options.folder, options.hidden, options.layers), options.rounds)
    if rank() == 0:
        publish("Loading quantised checkpoints", lines, options.output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

"""Time to get bf16 weights from disk into float32 shards: this library, its limit and its peers, alternating.

    torchrun --nproc-per-node 2 -m benchmarks.speed.load            # 2 ranks
    python -m benchmarks.speed.load                                 # 1 process
    python -m benchmarks.speed.load --plan                          # a 72B-shaped index planned for 64 ranks
    torchrun --nproc-per-node 2 -m benchmarks.speed.load --memory   # growth of anonymous memory

Everything runs with a warm cache and one thread for each rank. ``raw`` is the limit: the same bytes of each
file read in 1 MiB pieces and cast into float32 memory, without looking at what they are. A round times each
of the ways once, and the median over rounds is printed with its ratio to ``raw`` and to ours.

Every way writes its shards into fresh memory, as a load does in life; mapping it can take longer than the
reading. To leave that out, let malloc keep what it has (two rounds fill it
before any is counted): ``MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000``.
"""

import argparse
import gc
import json
import math
import multiprocessing
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp_sft as fs
from benchmarks.host_memory import PeakMemory
from fsdp_sft.weights import build_meta_model, load_weights

PIECE = 1 << 20
_WARM_UP = 2


def make_checkpoint(folder: Path, *, hidden: int, layers: int, vocab: int = 32000) -> Path:
    """A llama-shaped bf16 checkpoint of random values in files of 512 MB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 256,
        vocab_size=vocab,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="512MB")
    return folder


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def have_memory_ready(folder: Path) -> None:
    """Let the machine have the memory that a rank's shards will take, and this process not.

    A virtual machine may have to ask its host for every page that it has not used for some seconds, which can
    take longer than all that is measured here. They are written to and given back.
    """
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) * 2 // world() * 11 // 10
    torch.empty(size, dtype=torch.uint8).fill_(0)


def raw_reader(folder: Path) -> float:
    """The limit: this rank's share of each tensor's bytes in 1 MiB pieces, cast into float32 memory."""
    from fsdp_sft._tensors.safetensors import open_file, read_header

    started = time.perf_counter()
    buffer = torch.empty(PIECE, dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    keep = []
    for path in sorted(folder.glob("*.safetensors")):
        fd = open_file(path)
        for entry in read_header(fd).entries.values():
            share = entry.num_bytes // 2 // world()
            dest = torch.empty(share)
            keep.append(dest)
            start = entry.start + rank() * share * 2
            for at in range(0, share * 2, PIECE):
                count = min(PIECE, share * 2 - at)
                os.preadv(fd, [view[:count]], start + at)
                dest[at // 2 : (at + count) // 2].copy_(buffer[:count].view(torch.bfloat16))
        os.close(fd)
    return time.perf_counter() - started


def ours(folder: Path, mesh: Any, weights_only: bool) -> float:
    started = time.perf_counter()
    model = build_meta_model(folder)
    if mesh is not None:
        fs.shard_model(model, mesh=mesh)
    if weights_only:
        dist.barrier() if dist.is_initialized() else None
        started = time.perf_counter()
    load_weights(model, folder)
    return time.perf_counter() - started


def recipe(folder: Path, mesh: Any) -> float:
    """The published recipe: the whole model on every rank, then each block cast and sharded."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer.type(torch.float32), mesh=mesh, mp_policy=policy)
    fully_shard(model.type(torch.float32), mesh=mesh, mp_policy=policy)
    return time.perf_counter() - started


def plain(folder: Path, mesh: Any) -> float:
    from transformers import AutoModelForCausalLM

    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _touch(model)
    return time.perf_counter() - started


def _touch(model: torch.nn.Module) -> None:
    # bf16 weights are cast on loading, so nothing is left in the file's mapping; this makes sure of it.
    assert all(p.dtype == torch.float32 for p in model.parameters())


def native(folder: Path, mesh: Any) -> float:
    """Transformers' own sharded loading; its imports happen in a warm-up round that is not counted."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    started = time.perf_counter()
    AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=world())
    )
    return time.perf_counter() - started


def dcp(folder: Path, mesh: Any, weights_only: bool) -> float:
    """Torch's DCP reader of Hugging Face files, into float32 shards."""
    import torch.distributed.checkpoint as dcp_module
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    started = time.perf_counter()
    model = build_meta_model(folder)
    if mesh is not None:
        fs.shard_model(model, mesh=mesh)
    if weights_only:
        dist.barrier()
        started = time.perf_counter()
    model.to_empty(device="cpu")  # rotary tables stay garbage: this reader knows nothing of buffers
    dcp_module.load(dict(model.state_dict()), storage_reader=HuggingFaceStorageReader(str(folder)))
    return time.perf_counter() - started


def compare(folder: Path, rounds: int, skip: set[str]) -> dict[str, list[float]]:
    mesh = fs.build_mesh(device_type="cpu")
    ways: dict[str, Callable[[], float]] = {
        "raw": lambda: raw_reader(folder),
        "ours: weights": lambda: ours(folder, mesh, True),
        "ours: whole call": lambda: ours(folder, mesh, False),
        "transformers native": lambda: native(folder, mesh),
        "DCP reader: weights": lambda: dcp(folder, mesh, True),
        "DCP reader: whole call": lambda: dcp(folder, mesh, False),
        "published recipe": lambda: recipe(folder, mesh),
    }
    if world() == 1:
        ways["from_pretrained(float32)"] = lambda: plain(folder, mesh)
        ways["ours, not sharded"] = lambda: ours(folder, None, False)
    times: dict[str, list[float]] = {name: [] for name in ways if name not in skip}
    for round_ in range(rounds + _WARM_UP):
        for name in list(times):
            gc.collect()
            have_memory_ready(folder)
            dist.barrier()
            try:
                seconds = ways[name]()
            except Exception as error:
                times.pop(name)
                if rank() == 0:
                    print(f"{name}: not run, {type(error).__name__}: {str(error)[:150]}")
                continue
            slowest = torch.tensor(seconds)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if round_ >= _WARM_UP:
                times[name].append(float(slowest))
    return times


def show(times: dict[str, list[float]], total_bytes: int) -> None:
    """Medians; a ratio is the median of the rounds' own, since a machine's speed drifts."""

    def ratio(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))

    print(f"{total_bytes / 1e9:.2f} GB of bf16, {world()} ranks, {len(next(iter(times.values())))} rounds")
    print(f"{'':26s} median s   best   GB/s   x raw   x ours")
    for name, values in times.items():
        seconds = statistics.median(values)
        print(
            f"{name:26s} {seconds:8.3f} {min(values):6.3f} {total_bytes / seconds / 1e9:6.2f} "
            f"{ratio(name, 'raw'):7.2f} {ratio(name, 'ours: whole call'):8.2f}"
        )


def memory(folder: Path) -> tuple[int, int]:
    """(growth of anonymous memory at its peak, bytes of the shards)."""
    mesh = fs.build_mesh(device_type="cpu")
    model = build_meta_model(folder)
    fs.shard_model(model, mesh=mesh)
    gc.collect()
    with PeakMemory() as peak:
        load_weights(model, folder)
    return peak.grown, sum(p.to_local().numel() * 4 for p in model.parameters())


def sparse_checkpoint(folder: Path, config: Any, files: int = 37) -> int:
    """Headers of a bf16 checkpoint of ``config`` over files without data; its bytes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tensors = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    names, weight_map, total = sorted(tensors), {}, 0
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        header, at = {}, 0
        for name in names[number::files]:
            size = 2
            for n in tensors[name]:
                size *= n
            header[name] = {"dtype": "BF16", "shape": list(tensors[name]), "data_offsets": [at, at + size]}
            at += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as handle:
            handle.write(struct.pack("<Q", len(text)) + text)
            handle.truncate(8 + len(text) + at)
        total += at
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def plan_72b(ranks: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import Qwen2Config

    from fsdp_sft._tensors.sharding import sharding_of
    from fsdp_sft._tensors.stored import intersect
    from fsdp_sft.weights.plan import make_plan
    from fsdp_sft.weights.resolve import open_checkpoint

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    config = Qwen2Config(
        hidden_size=8192,
        intermediate_size=29568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=152064,
        tie_word_embeddings=False,
    )
    with tempfile.TemporaryDirectory() as name:
        total = sparse_checkpoint(Path(name), config)
        started = time.perf_counter()
        model = build_meta_model(name)
        built = time.perf_counter()
        fs.shard_model(model, mesh=fs.build_mesh(device_type="cpu"))
        sharded = time.perf_counter()
        plan = make_plan(model, open_checkpoint(Path(name)))
        counts = [0] * ranks
        for target in plan.targets.values():
            parameter = model.get_parameter(target.name)
            for rank, box in sharding_of(parameter).parts(parameter.shape):
                parts = [intersect(piece, box) for piece in target.pieces]
                counts[rank] += sum(2 * math.prod(part.size) for part in parts if part is not None)
        done = time.perf_counter()
    print(
        f"{total / 1e9:.1f} GB, {len(plan.targets)} tensors, {ranks} ranks: meta build {built - started:.2f} "
        f"s, shard {sharded - built:.2f} s, plan and count {done - sharded:.2f} s; bytes per rank "
        f"{min(counts) / 1e9:.4f}-{max(counts) / 1e9:.4f} GB, P/N {total / ranks / 1e9:.4f}, "
        f"sum / P {sum(counts) / total:.4f}"
    )


def checkpoint_of(root: Path, hidden: int, layers: int) -> Path:
    folder = root / f"{hidden}-{layers}"
    if rank() == 0 and not (folder / "config.json").exists():
        # In a process of its own: memory that this one has used already would not be fresh.
        arguments = {"hidden": hidden, "layers": layers}
        child = multiprocessing.get_context("spawn").Process(
            target=make_checkpoint, args=(folder,), kwargs=arguments
        )
        child.start()
        child.join()
    dist.barrier()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=4096, help="4096: layers of a 7B model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip", nargs="*", default=[], help="ways to leave out")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fsdp-sft-bench")
    options = parser.parse_args()
    if options.plan:
        plan_72b(64)
        return
    torch.set_num_threads(1)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    fs.init_distributed(device_type="cpu")
    folder = checkpoint_of(options.folder, options.hidden, options.layers)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if options.memory:
        growth, shards = memory(folder)
        if rank() == 0:
            print(
                f"{total / 1e9:.2f} GB of bf16: anonymous memory grew by {growth / 2**20:.0f} MiB, "
                f"shards {shards / 2**20:.0f} MiB, beyond them {(growth - shards) / 2**20:.0f} MiB"
            )
    else:
        times = compare(folder, options.rounds, set(options.skip))
        if rank() == 0:
            show(times, total)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

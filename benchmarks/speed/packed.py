r"""Bytes and steps of adapters on a frozen base that stays packed, beside the same base in bfloat16.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.speed.packed \
        --output packed.md

Every way trains the same rows, a step of each after the other. Bytes held are those of the frozen weights of
blocks on one rank, counted; bytes gathered are what a rank gets in all gathers of a step, counted as they
run, beside the sum over parameters: those of blocks twice, since every block is recomputed, the others once.
Memory is what loading takes at its peak beyond the weights.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

import fsdp_sft as fs
from benchmarks.host_memory import PeakMemory
from benchmarks.tables import publish, table
from fsdp_sft._tensors.boxes import local_of, memory_of
from fsdp_sft._tensors.packed_shard import PackedShard

BASES = {"bfloat16": None, "fp8": "fp8", "nf4": "nf4"}


def frozen_of_blocks(model: Any) -> list[Any]:
    return [
        p for name, p in model.named_parameters() if ".layers." in name and p.ndim > 1 and not p.requires_grad
    ]


class Gathered(TorchDispatchMode):
    """Counts the bytes that this rank gets in gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in func.overloadpacket.__name__:
            out = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            self.num_bytes += out.numel() * out.element_size()
        return func(*args, **(kwargs or {}))


def gathered_by_formula(model: Any, dtype: torch.dtype) -> int:
    """Bytes of a step's gathers: packed ones as they are held, others in the dtype of the compute."""
    total = 0
    for name, parameter in model.named_parameters():
        is_packed = isinstance(local_of(parameter), PackedShard)
        held = memory_of(parameter).numel() * dist.get_world_size() if is_packed else 0
        total += (2 if ".layers." in name else 1) * (held or parameter.numel() * dtype.itemsize)
    return total


def load(folder: Path, kind: Any, policy: Any) -> tuple[Any, int]:
    """(a model with adapters, the bytes that its load took beyond the weights)."""
    gc.collect()
    with PeakMemory() as peak:
        model: Any = fs.load_pretrained(
            folder,
            mesh=fs.build_mesh(device_type="cpu"),
            frozen_dtype=kind,
            mp_policy=policy,
            peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
            sac_ratio=1,
        )
    held = sum(memory_of(p).numel() * memory_of(p).element_size() for p in model.parameters())
    return model, max(0, peak.grown - held)


def measure(folder: Path, length: int, rounds: int, dtype: torch.dtype) -> list[str]:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    ranks = dist.get_world_size()
    models, took, seconds = {}, {}, {name: [] for name in BASES}
    for name, kind in BASES.items():
        models[name], took[name] = load(folder, kind if kind is not None else dtype, policy)
    optimizers = {
        name: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        for name, model in models.items()
    }
    ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(dist.get_rank()))
    window = [{"input_ids": ids, "labels": ids}]
    for _ in range(rounds + 1):
        for name, model in models.items():
            dist.barrier()
            started = time.perf_counter()
            fs.train_step(model, window, optimizers[name], check=False)
            seconds[name].append(time.perf_counter() - started)
    rows = []
    for name, model in models.items():
        weights = frozen_of_blocks(model)
        values = sum(p.numel() for p in weights)
        held = sum(memory_of(p).numel() * memory_of(p).element_size() for p in weights)
        with Gathered() as gathered:
            fs.train_step(model, window, optimizers[name], check=False)
        ratios = [a / b for a, b in zip(seconds[name][1:], seconds["bfloat16"][1:], strict=True)]
        rows.append(
            [
                name if name != "bfloat16" else str(dtype).removeprefix("torch."),
                f"{held / 2**20:.1f}",
                f"{held * ranks * 8 / values:.2f}",
                f"{gathered.num_bytes / 2**20:.1f}",
                f"{gathered_by_formula(model, dtype) / 2**20:.1f}",
                f"{took[name] / 2**20:.0f}",
                f"{statistics.median(seconds[name][1:]):.2f}",
                f"{statistics.median(ratios):.2f}",
            ]
        )
    head = (
        "frozen",
        "MiB held",
        "bits a value",
        "MiB gathered a step",
        "by formula",
        "MiB to load",
        "s a step",
        "x 16 bits",
    )
    return [*table(head, rows), ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fs.init_distributed(device_type="cpu")
    folder = Path(tempfile.gettempdir()) / f"fsdp-sft-packed-{options.hidden}-{options.layers}"
    if dist.get_rank() == 0 and not (folder / "config.json").exists():
        sizes = {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden}
        layers = {"num_hidden_layers": options.layers, "num_attention_heads": 8, "num_key_value_heads": 8}
        config = LlamaConfig(vocab_size=1024, **sizes, **layers)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    dist.barrier()
    lines = [
        f"{dist.get_world_size()} ranks on 2 cores, one thread each, {options.rounds} rounds, a Llama of "
        f"width {options.hidden} with {options.layers} layers, LoRA of rank 8 on all linear layers, every "
        f"block recomputed (so that each is gathered twice), torch {torch.__version__}. Ratios are medians "
        "over rounds.",
        "",
    ]
    for length in options.lengths:
        lines += [f"Rows of {length} tokens:", ""]
        lines += measure(folder, length, options.rounds, torch.bfloat16)
    if dist.get_rank() == 0:
        publish("Adapters on a base that stays packed", lines, options.output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

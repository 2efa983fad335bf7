r"""A 4-bit base with adapters over two ranks: what each way holds on a rank, and what it refuses.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.checks.packed_peers \
        --output packed-peers.md

Ours, and what else there is: transformers with bitsandbytes (NF4) and peft, sharded by torch's
``fully_shard`` block by block, or by accelerate's FSDP2. A Llama and a Qwen3-MoE, whose experts are fused.
One forward and backward of a row, beside one process. Needs `pip install bitsandbytes accelerate`.
"""

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, Qwen3MoeConfig

import fsdp_sft as fs
from benchmarks.tables import publish, table
from fsdp_sft._tensors.boxes import memory_of


def lora() -> LoraConfig:
    return LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")


def held(model: nn.Module) -> int:
    """Bytes of the frozen matrices of blocks on this rank."""
    found = 0
    for name, parameter in model.named_parameters():
        if ".layers." in name and "lora_" not in name and "norm" not in name:
            local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local = memory_of(parameter) if hasattr(local, "fsdp_pre_all_gather") else local
            found += local.numel() * local.element_size()
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        found += 0 if state is None else state.absmax.numel() * state.absmax.element_size()
    return found


def in_4_bits(folder: Path) -> Any:
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, device_map="cpu")
    return get_peft_model(model, lora())


def ours(folder: Path, ids: torch.Tensor) -> Any:
    return fs.load_pretrained(
        folder,
        mesh=fs.build_mesh(device_type="cpu"),
        frozen_dtype="nf4",
        peft_config=lora(),
        mp_policy=MixedPrecisionPolicy(),
    )


def by_hand(folder: Path, ids: torch.Tensor) -> Any:
    model = in_4_bits(folder)
    for block in model.base_model.model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def by_accelerate(folder: Path, ids: torch.Tensor) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
    )
    accelerator = Accelerator(cpu=True)
    # FSDP2 is for accelerators only; its code runs on the CPU as it is.
    accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = in_4_bits(folder)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return accelerator.prepare(model, optimizer)[0]


WAYS: dict[str, Callable[[Path, torch.Tensor], Any]] = {
    'fsdp_sft, `frozen_dtype="nf4"`': ours,
    "transformers + bitsandbytes + peft, `fully_shard`": by_hand,
    "the same, accelerate's FSDP2": by_accelerate,
    "the same, one process": lambda folder, ids: in_4_bits(folder),
}


def tried(make: Callable[[Path, torch.Tensor], Any], folders: list[Path], ids: torch.Tensor) -> list[str]:
    """What a rank holds of each model, and what a forward and a backward came to."""
    cells = []
    for folder in folders:
        gc.collect()
        try:
            model = make(folder, ids)
            cells.append(f"{held(model) / 2**20:.2f}")
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            cells.append(f"loss {loss.item():.4f}")
        except Exception as error:  # what is refused is what is told
            text = str(error).strip().splitlines()[0] if str(error).strip() else ""
            cells = [*cells, *["-"] * (1 - len(cells) % 2), f"{type(error).__name__}: {text[:120]}"]
    return cells


def make_bases() -> list[Path]:
    sizes = {"vocab_size": 1024, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
    dense = LlamaConfig(**sizes, intermediate_size=1536, num_hidden_layers=4)
    sparse = Qwen3MoeConfig(
        **sizes,
        moe_intermediate_size=256,
        num_experts=16,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        head_dim=64,
    )
    folders = []
    for name, config in (("llama", dense), ("qwen3-moe", sparse)):
        folders.append(Path(tempfile.gettempdir()) / f"fsdp-sft-packed-peers-{name}")
        if dist.get_rank() == 0 and not (folders[-1] / "config.json").exists():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folders[-1])
    dist.barrier()
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fs.init_distributed(device_type="cpu")
    folders = make_bases()
    ids = torch.randint(3, 1000, (1, 128), generator=torch.Generator().manual_seed(0))
    rows = [[name, *tried(make, folders, ids)] for name, make in WAYS.items()]
    import accelerate
    import bitsandbytes
    import peft

    head = ["way"]
    for name in ("Llama", "Qwen3-MoE"):
        head += [f"{name}: MiB held", "a step"]
    lines = [
        f"{dist.get_world_size()} ranks (gloo, CPU): a Llama of 4 layers of width 512, and a Qwen3-MoE of 2 "
        "layers with 16 experts. MiB held: of the frozen matrices of blocks, with their scales, on a rank. "
        "The same row on every rank. "
        f"torch {torch.__version__}, accelerate {accelerate.__version__}, bitsandbytes "
        f"{bitsandbytes.__version__}, peft {peft.__version__}.",
        "",
        *table(head, rows),
        "",
    ]
    if dist.get_rank() == 0:
        publish("Adapters on a 4-bit base over ranks", lines, options.output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

"""What loading, saving and the loss take of a device's memory, beside what they promise: counted, not timed.

    python -m benchmarks.checks.device_memory --output device-memory.md

On two simulated accelerators (tests/simulated), whose allocator counts what each has in use, in blocks of
512 bytes as CUDA's.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fsdp_sft as fs
from benchmarks.checks.simulated import on_ranks
from benchmarks.tables import publish, table

RANKS = 2
MIB = 1 << 20


def _config(**changes: Any) -> Any:
    import transformers

    sizes = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    return transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=4, **{**sizes, **changes})


def _peak_of(call: Callable[[], Any]) -> tuple[int, int, Any]:
    """(most beside what was there before, what is left of it, result), in bytes."""
    before = torch.sim.memory_allocated()  # type: ignore[attr-defined]
    torch.sim.reset_peak_memory_stats()  # type: ignore[attr-defined]
    result = call()
    torch.accelerator.synchronize()
    peak = torch.sim.max_memory_allocated() - before  # type: ignore[attr-defined]
    return peak, torch.sim.memory_allocated() - before, result  # type: ignore[attr-defined]


def _shards(model: Any) -> int:
    return sum(-(-p.to_local().nbytes // 512) * 512 for p in {id(p): p for p in model.parameters()}.values())


def _row(what: str, promise: str, promised: int, counted: int) -> list[object]:
    return [
        what,
        promise,
        f"{promised / MIB:.2f}",
        f"{counted / MIB:.2f}",
        "yes" if counted <= promised else "no",
    ]


def _chunked_loss() -> list[object]:
    hidden = torch.randn(2, 512, 256, device="sim", requires_grad=True)
    weight = torch.randn(32000, 256, device="sim", requires_grad=True)
    labels = torch.randint(0, 32000, (2, 512), device="sim")
    chunk = 128
    peak, _, _ = _peak_of(
        lambda: fs.linear_cross_entropy_sum(hidden, weight, labels, chunk_size=chunk).backward()
    )
    # A few rows of a chunk's size beside it.
    logits, gradients = chunk * 32000 * 4, hidden.nbytes + weight.nbytes
    promised = logits + gradients + 4 * chunk * 256 * 4
    return _row(
        "chunked loss, float32",
        "chunk_size x V logits, gradients of the inputs, 4 chunks of rows",
        promised,
        peak,
    )


def _measure(folder: str) -> list[list[object]]:
    import transformers

    root = Path(folder)
    mesh = fs.build_mesh()
    if torch.distributed.get_rank() == 0:
        transformers.LlamaForCausalLM(_config()).to(torch.bfloat16).save_pretrained(root / "base")
    torch.distributed.barrier()
    rows: list[list[object]] = []
    meta = fs.build_meta_model(root / "base")
    peak, _, _ = _peak_of(lambda: fs.shard_model(meta, mesh=mesh))
    rows.append(_row("shard_model of a meta model", "nothing", 0, peak))
    peak, left, model = _peak_of(lambda: fs.load_pretrained(root / "base", mesh=mesh))
    shards, pieces = _shards(model), 4 * 2 * 8 * MIB
    rows.append(
        _row(
            "load_pretrained, beside the shards", "2 pieces of 8 MiB a thread, at most 4", pieces, peak - left
        )
    )
    rows.append(_row("load_pretrained, what stays", "the shards and 1 MiB of buffers", shards + MIB, left))
    batch = {"input_ids": torch.arange(64).view(2, 32), "labels": torch.arange(64).view(2, 32)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fs.train_step(model, [batch], optimizer, check=False)
    for name, async_ in (("save_checkpoint", False), ("save_checkpoint, async_=True", True)):
        peak, _, saved = _peak_of(
            lambda async_=async_: fs.save_checkpoint(
                root / "steps", 1 + async_, model=model, optimizer=optimizer, async_=async_
            )
        )
        saved.wait()
        rows.append(_row(name, "nothing", 0, peak))
    peak, _, _ = _peak_of(lambda: fs.save_full_state_dict(model, root / "full.safetensors"))
    rows.append(_row("save_full_state_dict", "nothing", 0, peak))
    peak, _, _ = _peak_of(lambda: fs.export_hf(model, root / "out"))
    rows.append(_row("export_hf to bfloat16", "nothing", 0, peak))
    peak, _, _ = _peak_of(lambda: fs.load_checkpoint(root / "steps", model=model, optimizer=optimizer))
    rows.append(_row("load_checkpoint", "2 pieces of 8 MiB a thread, at most 4", pieces, peak))
    rows.append(_chunked_loss())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    head = ["what", "promise", "MiB promised", "MiB counted", "kept"]
    with tempfile.TemporaryDirectory() as folder:
        rows = on_ranks(_measure, RANKS, folder)
    lines = [
        "`python -m benchmarks.checks.device_memory`: the most that a call has in use on a device beside",
        f"what was in use before, on rank 0 of {RANKS} simulated accelerators; torch {torch.__version__},",
        "a Llama of 4 blocks and a vocabulary of 32,000, read from bfloat16 into float32 shards.",
        "",
        *table(head, rows),
    ]
    publish("Memory of the device", lines, options.output)


if __name__ == "__main__":
    main()

r"""What packs are worth in hybrid models, whose layers beside attention are kept apart by rows.

    python -m benchmarks.speed.hybrid_packs

A few families train, forward and backward, on rows with lengths as in chats: packed, and padded in the order
in which they come, by turns.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import fsdp_sft as fs

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "pad_token_id": 0,
}
CAPACITY, ROWS, TOGETHER = 2048, 64, 8


def sized(family: str) -> Any:
    torch.manual_seed(0)
    if family == "Qwen3.5":
        heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "head_dim": 64}
        widths = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        config: Any = tf.AutoConfig.for_model("qwen3_5_text", **SIZES, **heads, **widths, layer_types=kinds)
    elif family == "Bamba":
        mixer = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
        config = tf.BambaConfig(**SIZES, **mixer, attn_layer_indices=[3])
    else:
        config = tf.Lfm2Config(**SIZES, layer_types=["conv"] * 3 + ["full_attention"])
    return tf.AutoModelForCausalLM.from_config(config).train()


def drawn() -> list[dict[str, list[int]]]:
    generator = random.Random(0)
    lengths = [min(CAPACITY, max(16, int(generator.lognormvariate(5.3, 0.9)))) for _ in range(ROWS)]
    rows = [[generator.randrange(5, 1000) for _ in range(length)] for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)

    def column(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([row[name] + [filler] * (width - len(row[name])) for row in rows])

    labels = column("labels", -100)
    return {"input_ids": column("input_ids", 0), "labels": labels, "attention_mask": (labels >= 0).long()}


def speeds(family: str) -> tuple[float, float]:
    """Tokens of rows a second: packed, and padded."""
    model, rows = sized(family), drawn()
    lengths = [len(row["input_ids"]) for row in rows]
    fs.use_varlen_attention(model)
    fs.verify_packing(model, max_length=256)
    collate = fs.PackedCollator(max_length=CAPACITY)
    packs = [collate([rows[i] for i in pack]) for pack in fs.pack_lengths(lengths, CAPACITY)]
    batches = [padded(rows[first : first + TOGETHER]) for first in range(0, ROWS, TOGETHER)]

    def seconds(given: list[dict[str, torch.Tensor]]) -> float:
        started = time.perf_counter()
        for batch in given:
            fs.loss_sum(model, batch)[0].backward()
        return time.perf_counter() - started

    seconds(packs[:1] + batches[:1])
    turns = [(seconds(packs), seconds(batches)) for _ in range(3)]
    best = [min(turn) for turn in zip(*turns, strict=True)]
    return sum(lengths) / best[0], sum(lengths) / best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tf.logging.set_verbosity_error()
    torch.set_num_threads(2)
    lines = [
        f"{ROWS} rows with lengths as in chats ({CAPACITY} at most), forward and backward in float32 on",
        f"2 cores without kernels, best of three turns: packs of {CAPACITY}, and padded {TOGETHER}",
        "together in the order of the rows.",
        "",
        "| layers of | packed, tokens/s | padded | ratio |",
        "|---|---|---|---|",
    ]
    for family in ("Qwen3.5", "Bamba", "LFM2"):
        fast, slow = speeds(family)
        lines.append(f"| {family} | {fast:,.0f} | {slow:,.0f} | {fast / slow:.1f} |")
    print("\n".join(lines))
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

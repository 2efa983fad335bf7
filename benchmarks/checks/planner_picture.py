"""Draw the planner's pictures of the docs.

python -m benchmarks.checks.planner_picture --output docs/images/where-the-memory-goes.png
python -m benchmarks.checks.planner_picture --rows --output docs/images/longest-rows.png
"""

import argparse
from pathlib import Path

from transformers import LlamaConfig, Qwen2Config

from fsdp_sft import Run, estimate_memory, longest_rows
from fsdp_sft._process.gpus import gpu_named
from fsdp_sft.planner.budget import budget_of
from fsdp_sft.planner.longest import peaks_by_length
from fsdp_sft.planner.picture import draw, draw_lengths, lengths_to_draw, row_table

CONFIG = Qwen2Config(  # https://huggingface.co/Qwen/Qwen2.5-14B/blob/main/config.json
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=152064,
    tie_word_embeddings=False,
)
LONG = LlamaConfig(  # https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
)
WAYS = {
    "nothing checkpointed, full logits": {"loss_impl": "logits"},
    "nothing checkpointed, chunked loss": {},
    "compiled": {"compile": True},
    "1/2 of the blocks checkpointed": {"sac_ratio": "1/2"},
    "every block checkpointed": {"sac_ratio": 1},
    "every block, micro-batch 8": {"sac_ratio": 1, "micro_batch_size": 8},
    "every block, 8 GPUs": {"sac_ratio": 1, "num_gpus": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", action="store_true", help="memory by the length of a row")
    args = parser.parse_args()
    output = args.output
    if args.rows:
        draw_rows(output)
        return
    base = {"num_gpus": 64, "micro_batch_size": 2, "seq_length": 4096}
    estimates = [
        (label, estimate_memory(CONFIG, Run(**{**base, **options}))) for label, options in WAYS.items()
    ]
    for label, estimate in estimates:
        print(f"{label}: {estimate.peak_bytes / 2**30:.1f} GiB, in the {estimate.peak_phase} phase")
    title = "Qwen2.5-14B on 64 H100 of 80 GB, 2 x 4096 tokens a micro-batch: memory per GPU at the peak"
    draw(output, estimates, budget=budget_of(gpu_named("h100"), 8), title=title)


def draw_rows(output: Path) -> None:
    job = {"num_gpus": 8, "attention_mask": False}
    rows = longest_rows(LONG, **job)
    print(row_table(rows))
    lengths = lengths_to_draw(rows)
    curves = [(row, peaks_by_length(LONG, row, lengths, **job)) for row in rows]
    title = "Llama-3.1-8B on 8 H100 of 80 GB: memory per GPU at the peak, by the GPUs (cp) that share a row"
    draw_lengths(output, lengths, curves, budget=budget_of(gpu_named("h100"), 8), title=title)


if __name__ == "__main__":
    main()

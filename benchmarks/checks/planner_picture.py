"""Draw the planner's picture of the docs.

python -m benchmarks.checks.planner_picture --output docs/images/where-the-memory-goes.png
"""

import argparse
from pathlib import Path

from transformers import Qwen2Config

from fsdp_sft import Run, estimate_memory
from fsdp_sft._process.gpus import gpu_named
from fsdp_sft.planner.budget import budget_of
from fsdp_sft.planner.picture import draw

CONFIG = Qwen2Config(  # https://huggingface.co/Qwen/Qwen2.5-14B/blob/main/config.json
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=152064,
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
    output = parser.parse_args().output
    base = {"num_gpus": 64, "micro_batch_size": 2, "seq_length": 4096}
    estimates = [
        (label, estimate_memory(CONFIG, Run(**{**base, **options}))) for label, options in WAYS.items()
    ]
    for label, estimate in estimates:
        print(f"{label}: {estimate.peak_bytes / 2**30:.1f} GiB, in the {estimate.peak_phase} phase")
    title = "Qwen2.5-14B on 64 H100 of 80 GB, 2 x 4096 tokens a micro-batch: memory per GPU at the peak"
    draw(output, estimates, budget=budget_of(gpu_named("h100"), 8), title=title)


if __name__ == "__main__":
    main()

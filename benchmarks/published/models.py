"""Plans of well-known models on 8 GPUs, by the planner alone: no network, no weights, no GPU.

python -m benchmarks.published.models --page docs/how-to/plan-a-run.md
python -m benchmarks.published.models --only "Qwen3 8B"

The sizes are those of each model's published ``config.json`` on the Hub.
"""

import argparse
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import (
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

import fsdp_sft as fs

GPUS = {"h100": "H100 80 GB", "a100": "A100 80 GB", "4090": "RTX 4090 24 GB"}
LENGTH, BATCH = 4096, 64
GIB = 2**30
# What is tried in this order, as options of the command line, until one fits.
WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "--lora 16": {"lora_rank": 16},
    "--lora 16 --frozen-dtype nf4": {"lora_rank": 16, "frozen_dtype": "nf4"},
}


@dataclass(frozen=True)
class Model:
    """A published model: its name on the Hub and the sizes of its text model."""

    hub: str
    config: PreTrainedConfig
    ways: dict[str, dict[str, Any]] = field(default_factory=lambda: WAYS)


LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
AS_STORED = {
    "": {},
    "--lora 16": {"lora_rank": 16},
    "--lora 16 --frozen-dtype stored": {"lora_rank": 16, "frozen_dtype": "stored"},
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}

MODELS = {
    "Llama 3.1 8B": Model(
        "meta-llama/Llama-3.1-8B-Instruct",
        LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            **LLAMA,
        ),
    ),
    "Llama 3.1 70B": Model(
        "meta-llama/Llama-3.1-70B-Instruct",
        LlamaConfig(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            **LLAMA,
        ),
    ),
    "Qwen3 8B": Model(
        "Qwen/Qwen3-8B",
        Qwen3Config(
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            **QWEN3,
        ),
    ),
    "Qwen3 32B": Model(
        "Qwen/Qwen3-32B",
        Qwen3Config(
            hidden_size=5120,
            intermediate_size=25600,
            num_hidden_layers=64,
            num_attention_heads=64,
            **QWEN3,
        ),
    ),
    "Qwen3.5 9B": Model(
        "Qwen/Qwen3.5-9B",
        Qwen3_5TextConfig(
            vocab_size=248320,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=32,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        ),
    ),
    "Gemma 4 31B": Model(
        "google/gemma-4-31B-it",
        Gemma4TextConfig(
            vocab_size=262144,
            hidden_size=5376,
            intermediate_size=21504,
            num_hidden_layers=60,
            num_attention_heads=32,
            num_key_value_heads=16,
            num_global_key_value_heads=4,
            head_dim=256,
            global_head_dim=512,
            attention_k_eq_v=True,
            sliding_window=1024,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            final_logit_softcapping=30.0,
            tie_word_embeddings=True,
        ),
    ),
    "Mistral 7B v0.3": Model(
        "mistralai/Mistral-7B-Instruct-v0.3",
        MistralConfig(
            vocab_size=32768,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=32768,
            sliding_window=None,
        ),
    ),
    "gpt-oss 20B": Model(
        "openai/gpt-oss-20b",
        GptOssConfig(
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=24,
            num_local_experts=32,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            quantization_config=MXFP4,
        ),
        AS_STORED,
    ),
}


def first_plan(model: Model, gpu: str) -> tuple[str, fs.RunPlan] | str:
    """Options and the fastest plan of the first way that fits; what the leanest way needs if none does."""
    said = ""
    for options, fields in model.ways.items():
        try:
            plans = fs.plan_run(
                model.config, num_gpus=8, gpu=gpu, seq_length=LENGTH, global_batch_size=BATCH, **fields
            )
        except fs.NoPlanError as error:
            said = str(error)
        else:
            return options, plans[0]
    return said


def _options(line: str) -> list[str]:
    """Options of a command line, each with its value."""
    return [f"--{option.strip()}" for option in line.split("--")[1:]]


def row(name: str, gpu: str) -> str:
    """One line of the table."""
    model = MODELS[name]
    found = first_plan(model, gpu)
    if isinstance(found, str):
        return f"| {name} | {GPUS[gpu]} | nothing fits | | | | | `--model {model.hub}` `--gpu {gpu}` |"
    options, plan = found
    run = plan.run
    trained = "all" if not options else f"LoRA, {run.frozen_dtype or 'bfloat16'}"
    batch = f"{run.micro_batch_size} x {run.grad_accum_steps}"
    tight = ", tight" if plan.is_tight else ""
    ratio = {"0": "none", "1": "all"}.get(str(run.sac_ratio), run.sac_ratio)
    added = " ".join(f"`{option}`" for option in _options(f"--model {model.hub} --gpu {gpu} {options}"))
    return (
        f"| {name} | {GPUS[gpu]} | {trained} | {batch} | {ratio}"
        f" | {plan.estimate.peak_bytes / GIB:.1f}{tight} | {plan.time.total:.1f} s | {added} |"
    )


HEAD = (
    "| model | 8 GPUs | trained, base | micro-batch x accumulation | blocks checkpointed"
    " | peak GiB | step | add |",
    "|---|---|---|---|---|---|---|---|",
)


def put_into(page: Path, lines: list[str]) -> None:
    """Put the table between the page's two comments."""
    begin, end = "models --page docs/how-to/plan-a-run.md`. -->\n", "<!-- The end. -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    table = "\n".join([*HEAD, *lines])
    page.write_text(f"{before}{begin}\n{table}\n\n{end}{after}")


def main() -> None:
    """Print the table, and put it into the page that ``--page`` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = []
    for name in arguments.only:
        for gpu in GPUS:
            lines.append(row(name, gpu))
            print(lines[-1], flush=True)
    if arguments.page is not None:
        put_into(arguments.page, lines)


if __name__ == "__main__":
    main()

"""Hold the planner against what others have published.

python -m benchmarks.published.compare

Memory: what each published run needed, and whether it fitted. Speed: tokens a second, with the planner's
shares of the device's rates fitted to all sources but the one they are compared with.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from benchmarks.published.evidence import FITS, SPEEDS
from benchmarks.tables import table as table_lines
from fsdp_sft import Run, estimate_memory
from fsdp_sft._process.gpus import gpu_named
from fsdp_sft.planner.estimate import budget_of
from fsdp_sft.planner.model import build_skeleton
from fsdp_sft.planner.speed import RATES, Rates, step_time

OUTPUT = Path(__file__).parents[1] / "results" / "planner.md"
GIB = 1 << 30

# The evidence's words for a device, as the planner has them.
GPUS = {
    "H100 80GB": "h100",
    # github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md: HBM2e, 500 W
    "H100 96GB HBM2e (500 W)": "h100-hbm2e=95.6,850,2400,link=450,network=50",
    "A100 80GB": "a100",
    "A100 40GB": "a100-40gb",
    "A100-SXM4 40GB": "a100-40gb",
    "A800 80GB": "a100",
    "RTX 4090": "4090",
    "RTX A6000": "a6000",
    "H200": "h200",
    "B200": "b200",
    "B300": "b300",
    "V100 16GB": "v100=16,112,900,link=150",
    "RTX 6000 Ada": "6000-ada=48,364,960",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RATIOS = {"none": 0, "full": 1, "op": "1/2", "selective blocks": "1/3"}
FUSED = ("KempnerInstitute/KempnerForge", "whitecircle/halo")  # one kernel for the update

# Why a memory row cannot be compared, by what tells it.
_LOSS = "its loss keeps more copies of the logits than a plain one: the error grows with logits x tokens"
_OWN_LOSS = {"PrimeIntellect-ai/prime-rl": _LOSS}
_KERNELS = {
    "whitecircle/halo": "fused kernels (liger) keep less than transformers' layers",
    "KempnerInstitute/KempnerForge": "holds on to gathered parameters: the gap is that of the whole model",
}
# What the wrong answers come from: (source, model, micro-batch, tokens of a row).
_COPIES = "a loop that keeps several float32 copies of the logits; the planner has one at a time"
WRONG = {
    ("Lightning-AI/litgpt", "Llama-2-7b-hf", 4, 1304): "3.2 GiB short of the limit; that source's measured "
    "runs need 6 to 12 % more than the planner says",
    ("whitecircle/halo", "Qwen3-8B", 4, 8192): "fused kernels (liger) keep less than transformers' layers",
    (
        "pytorch/torchtitan",
        "Llama-2-13b-hf",
        2,
        4096,
    ): "1.1 GiB over, with logits in float32, which is assumed",
    ("axolotl-ai-cloud/axolotl", "SmolLM2-1.7B", 1, 16384): _COPIES,
    ("linkedin/Liger-Kernel", "Meta-Llama-3-8B", 8, 4096): _COPIES,
}
_BELOW_PEAK = 0.9  # of a device's peak; what would have needed more was not computed as described

# The runs that were chosen before anything was fitted: (source, model, GPUs, tokens of a row, compiled).
CHOSEN = {
    ("pytorch/torchtitan", "Llama-3.1-8B", 8, 8192, False),
    ("pytorch/torchtitan", "Llama-3.1-8B", 8, 8192, True),
    ("pytorch/torchtitan", "Qwen3-32B", 8, 4096, True),
    ("KempnerInstitute/KempnerForge", "kempnerforge-7b", 1, 4096, True),
    ("KempnerInstitute/KempnerForge", "kempnerforge-7b", 4, 4096, True),
    ("KempnerInstitute/KempnerForge", "kempnerforge-13b", 8, 4096, False),
    ("PrimeIntellect-ai/prime-rl", "Qwen3-4B-Instruct-2507", 8, 16384, False),
    ("PrimeIntellect-ai/prime-rl", "Qwen3-0.6B", 1, 16384, False),
    ("foundation-model-stack/fms-fsdp", "Llama-2-7b-hf", 96, 4096, True),
    ("foundation-model-stack/fms-fsdp", "Llama-2-7b-hf", 128, 4096, True),
    ("NVIDIA-NeMo/Automodel", "Llama-3.1-8B", 1, 4096, False),
    ("NVIDIA-NeMo/Automodel", "Qwen2.5-32B-Instruct", 8, 4096, False),
    ("whitecircle/halo", "Qwen3-4B", 1, 2048, False),
}
_CHOSEN_HALO = 16  # rows of halo's run
# The error hardly depends on network and contention, as long as one makes up for the other. NCCL's gathers
# are seen to reach four fifths of the links; and more contention than this would have a larger micro-batch
# that is bought with recomputation win within a node, where it was measured to lose.
GRID = {
    "products": (0.75, 0.8, 0.85, 0.9, 0.95),
    "attention": (0.3, 0.4, 0.5, 0.6),
    "memory": (0.8, 0.9),
    "network": (0.8,),
    "contention": (0.0, 0.2, 0.3, 0.4),
}


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(table_lines(head, rows))


def config_of(fields: dict[str, Any]) -> Any:
    """The transformers config; MPT, whose attention transformers computes in full, as GPT-NeoX."""
    fields = dict(fields)
    family = fields.pop("model_type")
    if family == "mpt":
        return CONFIG_MAPPING["gpt_neox"](
            hidden_size=fields["d_model"],
            intermediate_size=4 * fields["d_model"],
            num_hidden_layers=fields["n_layers"],
            num_attention_heads=fields["n_heads"],
            vocab_size=fields["vocab_size"],
            tie_word_embeddings=True,
            use_parallel_residual=False,
            max_position_embeddings=65536,
        )
    return CONFIG_MAPPING[family](**{"max_position_embeddings": 131072, **fields})


def options_of(row: dict[str, Any]) -> dict[str, Any]:
    """The planner's arguments for a published run."""
    shards = row["num_gpus"] if row["sharding"] not in ("none", "ddp") else 1
    chunked = row["loss"] in ("chunked", "fused")
    optimizer = "adamw_fused" if row["repo"] in FUSED else row["optimizer"]
    options = {
        "num_gpus": shards,
        "micro_batch_size": row["micro_batch_size"],
        "seq_length": row["seq_length"],
        "sac_ratio": RATIOS[row["sac"]],
        "compile": row["compile"],
        "master_dtype": DTYPES[row["param_dtype"]],
        "param_dtype": DTYPES[row["compute_dtype"]],
        "gpu": GPUS[row["gpu"]],
        "attention_mask": False,
        "loss_impl": "chunked" if chunked else "logits",
        "logits_dtype": None if chunked else DTYPES[row["logits_dtype"]],
        "optimizer": optimizer,
        "lora_rank": row["lora_rank"] or 0,
        "lora_targets": row["lora_targets"] if row["method"] == "lora" else None,
    }
    if "reshard_after_forward=False" in row["note"]:
        options["reshard_after_forward"] = False
    return options


def short(row: dict[str, Any]) -> list[str]:
    """What was run, in the cells of a table's line."""
    ways = [row["sac"] if row["sac"] != "none" else "", "compiled" if row["compile"] else ""]
    ways += [f"lora {row['lora_rank']}" if row["method"] == "lora" else "", row["param_dtype"]]
    return [
        f"[{row['repo']}]({row['source']})",
        row["model"].split("/")[-1].split(" (")[0],
        f"{row['num_gpus']} x {row['gpu']}",
        f"{row['micro_batch_size']} x {row['seq_length']}",
        ", ".join(filter(None, ways)),
    ]


# --- memory -----------------------------------------------------------------------------------------------


def memory_rows() -> Iterator[dict[str, Any]]:
    for row in FITS:
        if row["sac"] == "op":
            continue  # the planner knows blocks that are checkpointed as a whole
        options = options_of(row)
        try:
            peak = estimate_memory(config_of(row["config"]), Run(**options)).peak_bytes
        except ValueError as error:
            yield {"row": row, "error": str(error).partition(":")[0]}
            continue
        usable = budget_of(gpu_named(options["gpu"]), options["num_gpus"]).usable_bytes
        yield {"row": row, "peak": peak, "usable": usable, "fits": peak <= usable}


def memory_section() -> str:
    found = list(memory_rows())
    judged = [one for one in found if "fits" in one]
    right = [one for one in judged if one["fits"] == one["row"]["answer"]]
    lines = []
    errors: dict[str, list[float]] = {}
    for one in found:
        row = one["row"]
        if "error" in one:
            lines.append([*short(row), "", "", "", f"refused: {one['error']}"])
            continue
        measured = row["measured_gib"]
        error = one["peak"] / GIB / measured - 1 if measured else None
        if error is not None:
            kind = "other losses and kernels" if row["repo"] in (*_OWN_LOSS, *_KERNELS) else "plain"
            errors.setdefault(f"{row['measured_kind']}, {kind}", []).append(error)
        case = (row["repo"], short(row)[1], row["micro_batch_size"], row["seq_length"])
        verdict = (
            "right" if one["fits"] == row["answer"] else f"**wrong**: {WRONG.get(case, 'not explained')}"
        )
        said = f"{measured:.1f} ({row['measured_kind']})" if measured else ""
        lines.append(
            [
                *short(row),
                f"{one['peak'] / GIB:.1f} of {one['usable'] / GIB:.1f}",
                said,
                "" if error is None else f"{error:+.0%}",
                f"{'fits' if row['answer'] else 'out of memory'}: {verdict}",
            ]
        )
    head = ["source", "model", "GPUs", "rows", "how", "estimate, GiB", "measured", "error", "published"]
    parts = [
        f"## Does it fit?\n\n{len(right)} of {len(judged)} answers are right.",
        table(head, lines),
        "Errors of the estimate, by what was measured:",
        table(
            ["measured", "runs", "mean", "mean of absolute values", "worst"],
            [
                [
                    kind,
                    str(len(several)),
                    f"{statistics.mean(several):+.1%}",
                    f"{statistics.mean(map(abs, several)):.1%}",
                    f"{max(several, key=abs):+.1%}",
                ]
                for kind, several in sorted(errors.items())
            ],
        ),
        "Other losses and kernels: "
        + "; ".join(f"{k}: {v}" for k, v in {**_OWN_LOSS, **_KERNELS}.items())
        + ".",
    ]
    return "\n\n".join(parts)


# --- speed ------------------------------------------------------------------------------------------------


def speed_rows() -> Iterator[tuple[dict[str, Any], Run, Any]]:
    """The runs that can be compared: the planner's own kinds of parallelism, below the device's peak."""
    for row in SPEEDS:
        if "tp" in row["sharding"] or "+ep" in row["sharding"] or row["cpu_offload"]:
            continue
        setup = Run(grad_accum_steps=1, **options_of(row))
        skeleton = build_skeleton(config_of(row["config"]), setup)
        passes = 3 if row["method"] == "full" else 2
        passes += 1 if row["sac"] == "full" else 0
        needed = 2 * passes * skeleton.active_parameters * row["tokens_per_second_per_gpu"]
        if needed < _BELOW_PEAK * setup.device.flops_per_second:
            yield row, setup, skeleton


def is_chosen(row: dict[str, Any]) -> bool:
    model = short(row)[1]
    key = (row["repo"], model, row["num_gpus"], row["seq_length"], row["compile"])
    if row["gpu"] == "B200" or (
        row["repo"] == "whitecircle/halo" and row["micro_batch_size"] != _CHOSEN_HALO
    ):
        return False
    return key in CHOSEN


def log_error(rates: Rates, setup: Run, skeleton: Any, published: float) -> float:
    tokens = setup.micro_batch_size * setup.seq_length
    return math.log(tokens / step_time(skeleton, setup, rates).total / published)


def speed_section() -> str:
    rows = list(speed_rows())
    grid = [Rates(**dict(zip(GRID, values, strict=True))) for values in itertools.product(*GRID.values())]
    known = {
        rates: [
            log_error(rates, setup, model, row["tokens_per_second_per_gpu"]) for row, setup, model in rows
        ]
        for rates in grid
    }
    sources = sorted({row["repo"] for row, _, _ in rows})

    def error_without(rates: Rates, source: str | None) -> float:
        """The mean over sources of their rows' median.

        One with many rows counts no more than one with few, and a row that has another cause no more than
        the others.
        """
        means = []
        for other in sources:
            if other != source:
                own = [
                    abs(e) for e, (row, _, _) in zip(known[rates], rows, strict=True) if row["repo"] == other
                ]
                means.append(statistics.median(own))
        return statistics.mean(means)

    fitted = {source: min(grid, key=lambda r: error_without(r, source)) for source in [None, *sources]}
    lines, errors, chosen = [], [], []
    for index, (row, _, _) in enumerate(rows):
        rates = fitted[row["repo"]]
        error = math.expm1(known[rates][index])
        errors.append(
            (abs(error), f"{row['repo']}, {row['model'].split('/')[-1]}, {row['seq_length']} tokens")
        )
        if is_chosen(row):
            chosen.append(errors[-1])
        published = row["tokens_per_second_per_gpu"]
        lines.append([*short(row), f"{published * (1 + error):,.0f}", f"{published:,.0f}", f"{error:+.0%}"])
    shares = [
        ["in the planner", *_shares(RATES)],
        *([source or "fitted to all sources", *_shares(rates)] for source, rates in fitted.items()),
    ]
    largest, where = max(errors)
    dropped = len(SPEEDS) - len(rows)
    parts = [
        "## Tokens a second of one GPU\n\nEach source is compared with shares fitted to the others. Of the "
        f"{len(chosen)} runs that were chosen before anything was fitted, the mean of the absolute errors "
        f"is **{statistics.mean(e for e, _ in chosen):.1%}**, the worst {max(chosen)[0]:.0%} "
        f"({max(chosen)[1]}). Of all {len(rows)} runs of {len(sources)} sources the mean is "
        f"{statistics.mean(e for e, _ in errors):.1%}, the median "
        f"{statistics.median(e for e, _ in errors):.1%}; the worst is {largest:.0%} ({where}). "
        f"{dropped} published rows are left out: tensor or expert parallel, shards on the host, or faster "
        f"than {_BELOW_PEAK:.0%} of the device's peak. Operations that are checkpointed one by one are taken "
        "as half of the blocks.",
        table(["source", "model", "GPUs", "rows", "how", "planner", "published", "error"], lines),
        "Shares of the device's rates, fitted without the source named:",
        table(["without", *GRID], shares),
    ]
    return "\n\n".join(parts)


def _shares(rates: Rates) -> list[str]:
    return [f"{getattr(rates, name):g}" for name in GRID]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    head = (
        "# The planner beside published runs\n\n`python -m benchmarks.published.compare`; the runs, with "
        "what their sources do not say, are in benchmarks/published/evidence.json."
    )
    args.output.write_text("\n\n".join([head, memory_section(), speed_section()]) + "\n")
    print(args.output.read_text())


if __name__ == "__main__":
    main()

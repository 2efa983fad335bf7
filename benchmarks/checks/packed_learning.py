r"""Adapters on a base that stays packed, taught the example's chats, beside the same base in bfloat16.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.checks.packed_learning \
        --output packed-learning.md

The base is the example's model, trained in full for some steps on the chats of ``examples/data`` and saved
in bfloat16; for "stored" the same base is written in FP8, in blocks of 64 x 64, as checkpoints are published.
LoRA on all linear layers of its blocks then goes on, with the same rows in the same order for all. What is
asked is the merged export, read by transformers.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

import fsdp_sft as fs
from benchmarks.tables import publish, table

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = {"bfloat16": torch.bfloat16, "stored (FP8)": "stored", "fp8": "fp8", "nf4": "nf4"}
BLOCK = 64


def read_rows(name: str) -> list[Any]:
    return [json.loads(line) for line in (EXAMPLES / "data" / name).read_text().splitlines()]


def train(model: Any, tokenizer: Any, steps: int, rate: float, seed: int) -> list[float]:
    """Train on the chats; the loss of each step."""
    collate = fs.SFTCollator(tokenizer, max_length=128)
    rows = read_rows("chats.jsonl")
    sampler = fs.ResumableSampler(rows, seed=seed)
    loader = DataLoader(rows, 16, sampler=sampler, collate_fn=collate, drop_last=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    losses: list[float] = []
    while len(losses) < steps:
        for window in fs.windows(loader, 1):
            losses.append(fs.train_step(model, window, optimizer, scheduler=scheduler).loss)
            if len(losses) == steps:
                break
    return losses


@torch.no_grad()
def answered(folder: Path) -> float:
    """Share of the unseen questions that an export answers exactly."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = read_rows("chats-test.jsonl")
    prompts = [
        tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, tokenize=False)
        for row in rows
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    out = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [text == row["messages"][1]["content"] for text, row in zip(texts, rows, strict=True)]
    return sum(right) / len(right)


def make_base(folder: Path, steps: int) -> None:
    """``tiny``, ``base`` in bfloat16, and ``fp8`` with the same base in blocks. Collective: all ranks."""
    sys.path.insert(0, str(EXAMPLES))
    from tiny_model import make_tiny_model

    if dist.get_rank() == 0:
        texts = [message["content"] for row in read_rows("chats.jsonl") for message in row["messages"]]
        make_tiny_model(folder / "tiny", texts)
    dist.barrier()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny")
    model = fs.load_pretrained(
        folder / "tiny", mesh=fs.build_mesh(device_type="cpu"), mp_policy=MixedPrecisionPolicy()
    )
    train(model, tokenizer, steps, 1e-3, seed=0)
    fs.export_hf(model, folder / "base", tokenizer=tokenizer)
    if dist.get_rank() == 0:
        shutil.copytree(folder / "base", folder / "fp8")
        stored = {}
        for name, weight in load_file(folder / "base" / "model.safetensors").items():
            if "_proj.weight" in name:
                rows, columns = weight.shape
                blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
                scales = blocks.abs().amax((1, 3)) / 448
                weight = (blocks / scales[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
                stored[f"{name}_scale_inv"] = scales
            stored[name] = weight
        save_file(stored, folder / "fp8" / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "fp8" / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        (folder / "fp8" / "config.json").write_text(json.dumps(config))
    dist.barrier()


def learn(folder: Path, kind: str, steps: int, seed: int) -> tuple[list[float], float]:
    """(losses, share answered exactly) of one run. Collective: all ranks."""
    base = folder / ("fp8" if KINDS[kind] == "stored" else "base")
    torch.manual_seed(seed)
    model = fs.load_pretrained(
        base,
        mesh=fs.build_mesh(device_type="cpu"),
        frozen_dtype=KINDS[kind],
        mp_policy=MixedPrecisionPolicy(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    losses = train(model, tokenizer, steps, 2e-3, seed)
    out = fs.export_hf(model, folder / f"{kind}-{seed}".replace(" ", "-"), tokenizer=tokenizer)
    share = answered(out) if dist.get_rank() == 0 else 0.0
    return losses, fs.aggregate_metrics({"share": share}, reduce="max")["share"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-steps", type=int, default=80)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fs.init_distributed(device_type="cpu")
    made: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    folder = Path(made[0])
    make_base(folder, options.base_steps)
    before = answered(folder / "base") if dist.get_rank() == 0 else 0.0
    questions = len(read_rows("chats-test.jsonl"))
    runs = {
        kind: [learn(folder, kind, options.steps, seed) for seed in range(options.seeds)] for kind in KINDS
    }
    if dist.get_rank() == 0:
        marks = [0, *range(options.steps // 6 - 1, options.steps, options.steps // 6)]
        curves = [
            [kind, str(seed), *(f"{losses[mark]:.3f}" for mark in marks)]
            for kind, found in runs.items()
            for seed, (losses, _) in enumerate(found)
        ]
        shares = [
            [kind, *(f"{share:.1%}" for _, share in found), f"{statistics.mean(s for _, s in found):.1%}"]
            for kind, found in runs.items()
        ]
        seeds = [f"seed {seed}" for seed in range(options.seeds)]
        lines = [
            f"{dist.get_world_size()} ranks, the example's model after {options.base_steps} steps in full, "
            f"which answers {before:.1%} of {questions} unseen questions exactly; "
            f"then {options.steps} steps of LoRA of rank 16 on all linear layers, in float32, torch "
            f"{torch.__version__}.",
            "",
            "Unseen questions answered exactly by the merged export:",
            "",
            *table(["frozen", *seeds, "mean"], shares),
            "",
            "Loss of steps:",
            "",
            *table(["frozen", "seed", *(str(mark + 1) for mark in marks)], curves),
            "",
        ]
        publish("Learning with a base that stays packed", lines, options.output)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

"""The FSDP2 script of Democratizing-LLM-FT, ported: chats, activation checkpointing by ratio, bfloat16.

    srun python examples/ports/democratizing_sft.py --model FOLDER --data chats.jsonl --sac 1/3

After FSDP_sAC.py of https://github.com/BertrandCabotPro/Democratizing-LLM-FT (we found no licence there), in
our own words. What came and went, and what the original does without a word: examples/ports/README.md.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import fsdp_sft as fs

Batch = dict[str, torch.Tensor]


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Supervised fine-tuning of a causal language model on chats")
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder or Hub id")
    add("--data", type=Path, required=True, help=".jsonl of rows with messages")
    add("--output", type=Path, default=Path("out"))
    add("--batch-size", type=int, default=1, help="rows per GPU")
    add("--seq-length", type=int, default=4096)
    add("--grad-acc", type=int, default=1)
    add("--epochs", type=int, default=2)
    add("--lr", type=float, default=1e-5)
    add("--lr-warmup-ratio", type=float, default=0.1)
    add("--weight-decay", type=float, default=0.1)
    add("--sac", default=0, help="fraction of the blocks that recompute their activations, such as 1/3")
    add("--compile", action="store_true", help="compile each block")
    add("--num-workers", type=int, default=4)
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="compute; masters are float32")
    add("--weigh", choices=["targets", "batches"], default="targets", help="batches: as the original does")
    return parser.parse_args(words)


def mean_of_batch(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The original's loss, for labels that are shifted already or not."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    if "shift_labels" in batch:
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def one(batch: Batch) -> int:
    return 1


WEIGHING: dict[str, Any] = {"targets": {}, "batches": {"loss_fn": mean_of_batch, "count_fn": one}}


def warmup_and_cosine(
    optimizer: torch.optim.Optimizer, num_batches: int, args: argparse.Namespace
) -> SequentialLR:
    warmup_steps = int(num_batches * args.lr_warmup_ratio) * args.epochs / args.grad_acc
    steps = num_batches * args.epochs / args.grad_acc
    schedulers = [
        LinearLR(optimizer, start_factor=1e-9, total_iters=warmup_steps),
        CosineAnnealingLR(optimizer, T_max=steps - warmup_steps),
    ]
    return SequentialLR(optimizer, schedulers, milestones=[warmup_steps])


def train(
    args: argparse.Namespace, collate: Callable[[list[Any]], Batch] | None = None
) -> list[fs.StepResult]:
    """Train and save after each epoch; returns what each step did.

    ``collate`` takes the place of the library's, for batches of ``input_ids``, ``attention_mask`` and
    ``labels`` or, shifted already, ``shift_labels``.
    """
    context = fs.init_distributed()  # Slurm's variables, or torchrun's
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    compute = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    model = fs.load_pretrained(
        args.model,
        mesh=fs.build_mesh(),
        sac_ratio=args.sac,
        compile=args.compile,
        mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
    )
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    rows, counts = fs.filter_rows(rows, tokenizer, max_length=args.seq_length)
    if context.is_main:
        print(f"rows: {counts}")
    sampler = fs.ResumableSampler(rows)
    loader = DataLoader(
        rows,
        args.batch_size,
        sampler=sampler,
        num_workers=args.num_workers,
        collate_fn=collate or fs.SFTCollator(tokenizer, max_length=args.seq_length),
        pin_memory=context.device.type == "cuda",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, eps=1e-5)
    scheduler = warmup_and_cosine(optimizer, len(loader), args)
    logger = fs.MetricLogger(jsonl=args.output / "log.jsonl")
    meter = fs.ThroughputMeter(
        flops_per_token=fs.model_flops_per_token(model.config, args.seq_length),
        world_size=context.world_size,
        device=context.device,
    )
    results: list[fs.StepResult] = []
    weighing = WEIGHING[args.weigh]
    for _ in range(args.epochs):
        for window in fs.windows(loader, args.grad_acc):
            result = fs.train_step(model, window, optimizer, scheduler=scheduler, **weighing)
            results.append(result)
            meter.update(num_tokens=result.num_tokens)
            logger.log({"loss": result.loss, "grad_norm": result.grad_norm, **meter.stats()}, len(results))
        state = {"scheduler": scheduler.state_dict(), "sampler": sampler.state_dict()}
        checkpoints = args.output / "checkpoints"
        fs.save_checkpoint(checkpoints, len(results), model=model, optimizer=optimizer, train_state=state)
    return results


def main() -> None:
    train(parse_arguments())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

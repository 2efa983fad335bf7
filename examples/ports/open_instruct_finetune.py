r"""open-instruct's finetune.py, ported: padded chats, and a loss that is a mean or a sum.

    torchrun --standalone --nproc-per-node 2 examples/ports/open_instruct_finetune.py --model FOLDER \
        --data chats.jsonl

After open_instruct/finetune.py of https://github.com/allenai/open-instruct (Apache-2.0), in our own words.
What came and what went, and what the original does without a word: examples/ports/README.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, get_scheduler

import fsdp_sft as fs

Batch = dict[str, torch.Tensor]
NO_DECAY = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Instruction tuning")
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder or Hub id")
    add("--data", type=Path, required=True, help=".jsonl of rows with messages")
    add("--output", type=Path, default=Path("output"))
    add("--max-seq-length", type=int, default=4096)
    add("--per-device-train-batch-size", type=int, default=8)
    add("--gradient-accumulation-steps", type=int, default=1)
    add("--num-train-epochs", type=int, default=2)
    add("--learning-rate", type=float, default=2e-5)
    add("--lr-scheduler-type", default="linear")
    add("--warmup-ratio", type=float, default=0.03)
    add("--weight-decay", type=float, default=0.0)
    add("--clip-grad-norm", type=float, default=-1, help="0 and less: none")
    add("--checkpointing-steps", help="steps between checkpoints, or 'epoch'")
    add("--logging-steps", type=int, default=1)
    add("--resume", action="store_true", help="from the newest sound checkpoint in --output")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="compute; masters are float32")
    add(
        "--reduce-loss",
        choices=["targets", "mean", "sum"],
        default="targets",
        help="targets: the mean over all of a step; mean: of the batches' means, as the original has it; "
        "sum: the batches' sums, averaged over batches",
    )
    return parser.parse_args(words)


def sum_of_batch(model: nn.Module, batch: Batch) -> torch.Tensor:
    return fs.token_losses(model, batch).sum()


def mean_of_batch(model: nn.Module, batch: Batch) -> torch.Tensor:
    return sum_of_batch(model, batch) / (batch["labels"][:, 1:] != fs.IGNORE_INDEX).sum().clamp(min=1)


def one(batch: Batch) -> int:
    return 1


REDUCTIONS: dict[str, dict[str, Any]] = {
    "targets": {},
    "mean": {"loss_fn": mean_of_batch, "count_fn": one},
    "sum": {"loss_fn": sum_of_batch, "count_fn": one},
}


def grouped_parameters(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    groups: dict[float, list[nn.Parameter]] = {weight_decay: [], 0.0: []}
    for name, parameter in model.named_parameters():
        groups[0.0 if any(word in name for word in NO_DECAY) else weight_decay].append(parameter)
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params]


def train(args: argparse.Namespace) -> list[fs.StepResult]:
    """Train, save and export; returns what each step did."""
    context = fs.init_distributed()
    export_to, checkpoints = args.output / "export", args.output / "checkpoints"
    fs.check_export(export_to)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32)
    model = fs.load_pretrained(
        args.model, mesh=fs.build_mesh(), mp_policy=policy, new_vocab_size=len(tokenizer)
    )
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    rows, counts = fs.filter_rows(rows, tokenizer, max_length=args.max_seq_length, on_dropped="count")
    if context.is_main:
        print(f"rows: {counts}")
    sampler = fs.ResumableSampler(rows)
    collator = fs.SFTCollator(tokenizer, max_length=args.max_seq_length, on_dropped="count")
    size = args.per_device_train_batch_size
    loader: DataLoader[Any] = DataLoader(rows, size, sampler=sampler, collate_fn=collator)

    optimizer = torch.optim.AdamW(grouped_parameters(model, args.weight_decay), lr=args.learning_rate)
    total_steps = args.num_train_epochs * -(-len(loader) // args.gradient_accumulation_steps)
    warmup_steps = int(total_steps * args.warmup_ratio)
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, warmup_steps, total_steps)
    step = 0
    if args.resume:
        loaded = fs.load_checkpoint(checkpoints, model=model, optimizer=optimizer)
        step = loaded.step
        scheduler.load_state_dict(loaded.train_state["scheduler"])
        sampler.load_state_dict(loaded.train_state["sampler"])

    def save() -> None:
        state = {"scheduler": scheduler.state_dict(), "sampler": sampler.state_dict()}
        fs.save_checkpoint(checkpoints, step, model=model, optimizer=optimizer, train_state=state)

    reduction = REDUCTIONS[args.reduce_loss]
    options = {"max_grad_norm": args.clip_grad_norm if args.clip_grad_norm > 0 else None, **reduction}
    every = args.checkpointing_steps
    logger = fs.MetricLogger(jsonl=args.output / "log.jsonl")
    results: list[fs.StepResult] = []
    while sampler.epoch < args.num_train_epochs:
        for window in fs.windows(loader, args.gradient_accumulation_steps):
            result = fs.train_step(model, window, optimizer, scheduler=scheduler, **options)
            step += 1
            results.append(result)
            if step % args.logging_steps == 0:
                period = [one.loss for one in results[-args.logging_steps :]]
                logger.log({"train_loss": sum(period) / len(period), "tokens": result.num_tokens}, step)
            if every and every != "epoch" and step % int(every) == 0:
                save()
        if every == "epoch":
            save()
    fs.export_hf(model, export_to, tokenizer=tokenizer)
    return results


def main() -> None:
    train(parse_arguments())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

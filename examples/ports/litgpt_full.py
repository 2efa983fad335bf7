r"""litgpt's full fine-tuning, ported: a model with ``forward(idx)``, a loss of its own, warm-up and cosine.

    torchrun --standalone --nproc-per-node 2 examples/ports/litgpt_full.py --checkpoint lit_model.pth \
        --train train.jsonl --val val.jsonl

After https://github.com/Lightning-AI/litgpt/blob/main/litgpt/finetune/full.py (Apache-2.0), in our own words.
What came and what went, and what the original does without a word: examples/ports/README.md.

A row of the data is ``{"input_ids": [...], "labels": [...]}``, as litgpt's SFTDataset makes them: labels not
shifted, -100 where nothing is trained.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from small_gpt import GPT, Config  # with litgpt: from litgpt.model import GPT, Config
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR
from torch.utils.data import DataLoader

import fsdp_sft as fs


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune all parameters of a litgpt model")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="lit_model.pth: a state dict")
    add("--train", type=Path, required=True, help=".jsonl of input_ids and labels")
    add("--val", type=Path, required=True)
    add("--out", type=Path, default=Path("out/finetune/full"))
    add("--precision", choices=["bf16", "32-true"], default="bf16", help="compute; masters are float32")
    add("--epochs", type=int, default=5)
    add("--global-batch-size", type=int, default=16, help="rows per optimizer step, over all ranks")
    add("--micro-batch-size", type=int, default=1)
    add("--learning-rate", type=float, default=1e-3)
    add("--warmup-steps", type=int, default=100)
    add("--eval-interval", type=int, default=600, help="optimizer steps between evaluations")
    add("--eval-batches", type=int, default=100, help="at most so many per rank")
    add("--save-interval", type=int, default=1000, help="optimizer steps between checkpoints")
    add("--resume", action="store_true", help="from the newest sound checkpoint in --out")
    add("--weigh", choices=["targets", "batches"], default="targets", help="batches: as litgpt does")
    return parser.parse_args(words)


def read_rows(path: Path) -> list[dict[str, list[int]]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded on the right to the longest row; no mask, since a causal row does not look to its right."""
    filler = {"input_ids": 0, "labels": -100}
    return {
        name: pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=value)
        for name, value in filler.items()
    }


def sum_over_targets(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="none").sum()


def mean_of_batch(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The original's loss: with a count of one per batch a step averages the batches' means."""
    num_targets = (batch["labels"][:, 1:] != -100).sum()
    return sum_over_targets(model, batch) / num_targets.clamp(min=1)


def one(batch: dict[str, torch.Tensor]) -> int:
    return 1


WEIGHING = {
    "targets": {"loss_fn": sum_over_targets},  # the targets are counted from the labels
    "batches": {"loss_fn": mean_of_batch, "count_fn": one},
}


def get_lr_scheduler(optimizer: torch.optim.Optimizer, warmup_steps: int, max_steps: int) -> SequentialLR:
    warmup = LambdaLR(optimizer, lambda step: step / warmup_steps)
    annealing = CosineAnnealingLR(optimizer, T_max=max_steps - warmup_steps)
    return SequentialLR(optimizer, [warmup, annealing], milestones=[warmup_steps])


def train(args: argparse.Namespace) -> list[fs.StepResult]:
    """Fine-tune, save, and return what each step did."""
    context = fs.init_distributed()
    compute = torch.bfloat16 if args.precision == "bf16" else torch.float32
    model = GPT(Config())
    fs.apply_sac(model, 1)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    fs.shard_model(model, mesh=fs.build_mesh(), mp_policy=policy)
    fs.load_full_state_dict(model, args.checkpoint)

    rows, val_rows = read_rows(args.train), read_rows(args.val)
    sampler = fs.ResumableSampler(rows, seed=1337)
    loader = DataLoader(rows, args.micro_batch_size, sampler=sampler, collate_fn=collate)
    mine = val_rows[context.rank :: context.world_size]
    val_loader = DataLoader(mine, args.micro_batch_size, collate_fn=collate)
    grad_accum_steps = args.global_batch_size // context.world_size // args.micro_batch_size
    steps_per_epoch = len(loader) // grad_accum_steps

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = get_lr_scheduler(optimizer, args.warmup_steps, args.epochs * steps_per_epoch)
    step = 0
    if args.resume:
        loaded = fs.load_checkpoint(args.out, model=model, optimizer=optimizer)
        step = loaded.step
        scheduler.load_state_dict(loaded.train_state["scheduler"])
        sampler.load_state_dict(loaded.train_state["sampler"])
    options = {"max_grad_norm": None, **WEIGHING[args.weigh]}  # the original does not clip
    logger = fs.MetricLogger(jsonl=args.out / "log.jsonl")
    results = []
    while sampler.epoch < args.epochs:
        for window in fs.windows(loader, grad_accum_steps):
            result = fs.train_step(model, window, optimizer, scheduler=scheduler, **options)
            step += 1
            results.append(result)
            logger.log({"loss": result.loss, "learning_rate": scheduler.get_last_lr()[0]}, step)
            if step % args.eval_interval == 0:
                batches = itertools.islice(val_loader, args.eval_batches)
                evaluation = fs.evaluate(model, batches, loss_fn=sum_over_targets)
                logger.log({"val_loss": evaluation.loss, "val_ppl": evaluation.perplexity}, step)
            if step % args.save_interval == 0:
                state = {"scheduler": scheduler.state_dict(), "sampler": sampler.state_dict()}
                fs.save_checkpoint(args.out, step, model=model, optimizer=optimizer, train_state=state)
    evaluation = fs.evaluate(model, val_loader, loss_fn=sum_over_targets)
    logger.log({"val_loss": evaluation.loss, "val_ppl": evaluation.perplexity}, step)
    final = args.out / "final"
    fs.save_full_state_dict(model, final / "model.safetensors")
    if dist.get_rank() == 0:
        torch.save(load_file(final / "model.safetensors"), final / "lit_model.pth")
    return results


def main() -> None:
    train(parse_arguments())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

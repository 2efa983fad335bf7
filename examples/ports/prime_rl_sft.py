r"""prime-rl's SFT, ported: packs with positions, shifted targets and a mask, a loss of log-probabilities.

    torchrun --standalone --nproc-per-node 2 examples/ports/prime_rl_sft.py --model FOLDER --data chats.jsonl

After src/prime_rl/trainer/sft of https://github.com/PrimeIntellect-ai/prime-rl (Apache-2.0), in our own
words. What came and what went, and what the original does without a word:
examples/ports/README.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import fsdp_sft as fs

Batch = dict[str, torch.Tensor]
Sample = dict[str, list[int]]


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Supervised fine-tuning on packs of chats")
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder or Hub id")
    add("--data", type=Path, required=True, help=".jsonl of rows with messages")
    add("--val", type=Path, help="the same, to evaluate")
    add("--output", type=Path, default=Path("outputs"))
    add("--seq-len", type=int, default=4096, help="tokens of a row")
    add("--batch-size", type=int, default=128, help="rows of a step, over all ranks")
    add("--micro-batch-size", type=int, default=1, help="rows that make one pack")
    add("--max-steps", type=int, default=1000)
    add("--lr", type=float, default=1e-5)
    add("--weight-decay", type=float, default=0.01)
    add("--max-norm", type=float, default=1.0)
    add("--warmup-steps", type=int, default=10)
    add("--val-interval", type=int, default=50)
    add("--ckpt-interval", type=int, help="steps between checkpoints")
    add("--resume", action="store_true", help="from the newest sound checkpoint in --output")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="compute; masters are float32")
    return parser.parse_args(words)


def read_samples(path: Path, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> list[Sample]:
    """prime-rl's samples: ids, the target of each (shifted already), and which targets are trained."""
    samples = []
    for line in path.read_text().splitlines():
        chat = fs.encode_chat(json.loads(line), tokenizer, max_length=seq_len + 1, on_dropped="count")
        mask = [int(label != fs.IGNORE_INDEX) for label in chat.labels[1:]]
        if any(mask):
            ids = chat.input_ids
            samples.append({"input_ids": ids[:-1], "target_ids": ids[1:], "loss_mask": mask})
    return samples


class CatCollator:
    """prime-rl's batch: the samples of a pack one after the other, filled up to the pack's length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, samples: list[Sample]) -> Batch:
        columns: dict[str, list[int]] = {name: [] for name in ("input_ids", "target_ids", "loss_mask")}
        positions: list[int] = []
        for sample in samples:
            for name, column in columns.items():
                column.extend(sample[name])
            positions.extend(range(len(sample["input_ids"])))
        missing = self.length - len(positions)
        batch = {name: torch.tensor([column + [0] * missing]) for name, column in columns.items()}
        batch["loss_mask"] = batch["loss_mask"].bool()
        return batch | {"position_ids": torch.tensor([[*positions, *range(missing)]])}


def sum_of_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    targets = batch["target_ids"].masked_fill(~batch["loss_mask"], fs.IGNORE_INDEX)
    pack = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "shift_labels": targets}
    return fs.token_losses(model, pack).sum()


def num_trained(batch: Batch) -> int:
    return int(batch["loss_mask"].sum())


LOSS: dict[str, Any] = {"loss_fn": sum_of_losses, "count_fn": num_trained}


def loader_of(samples: list[Sample], args: argparse.Namespace, *, shuffle: bool) -> DataLoader[Any]:
    length = args.seq_len * args.micro_batch_size
    sampler = fs.PackedSampler(
        [len(sample["input_ids"]) for sample in samples],
        num_targets=[sum(sample["loss_mask"]) for sample in samples],
        max_length=length,
        shuffle=shuffle,
    )
    return DataLoader(samples, batch_sampler=sampler, collate_fn=CatCollator(length))


def train(args: argparse.Namespace) -> list[fs.StepResult]:
    """Train, evaluate, save and export; returns what each step did."""
    context = fs.init_distributed()
    fs.check_export(args.output / "export")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32)
    model = fs.load_pretrained(args.model, mesh=fs.build_mesh(), mp_policy=policy)
    loader = loader_of(read_samples(args.data, tokenizer, args.seq_len), args, shuffle=True)
    val_loader = args.val and loader_of(read_samples(args.val, tokenizer, args.seq_len), args, shuffle=False)
    grad_accum_steps = args.batch_size // (context.world_size * args.micro_batch_size)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    scheduler = LinearLR(optimizer, start_factor=1e-8, total_iters=args.warmup_steps)
    step, checkpoints = 0, args.output / "checkpoints"
    if args.resume:
        loaded = fs.load_checkpoint(checkpoints, model=model, optimizer=optimizer)
        step = loaded.step
        scheduler.load_state_dict(loaded.train_state["scheduler"])
        loader.batch_sampler.load_state_dict(loaded.train_state["sampler"])
    logger = fs.MetricLogger(jsonl=args.output / "log.jsonl")
    results = []
    while step < args.max_steps:
        for window in fs.windows(loader, grad_accum_steps):
            options = {"max_grad_norm": args.max_norm, "scheduler": scheduler, **LOSS}
            result = fs.train_step(model, window, optimizer, **options)
            step += 1
            results.append(result)
            logger.log({"loss": result.loss, "grad_norm": result.grad_norm}, step)
            if val_loader and step % args.val_interval == 0:
                evaluation = fs.evaluate(model, val_loader, **LOSS)
                logger.log({"val_loss": evaluation.loss, "val_perplexity": evaluation.perplexity}, step)
            if args.ckpt_interval and step % args.ckpt_interval == 0:
                state = {"scheduler": scheduler.state_dict(), "sampler": loader.batch_sampler.state_dict()}
                fs.save_checkpoint(checkpoints, step, model=model, optimizer=optimizer, train_state=state)
            if step == args.max_steps:
                break
    fs.export_hf(model, args.output / "export", tokenizer=tokenizer)
    return results


def main() -> None:
    train(parse_arguments())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

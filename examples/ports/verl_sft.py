r"""verl's SFTTrainer, ported: batches of nested tensors without padding, a loss of log-probabilities.

    torchrun --standalone --nproc-per-node 2 examples/ports/verl_sft.py --model FOLDER --data chats.jsonl

After verl/trainer/sft_trainer.py of https://github.com/verl-project/verl (Apache-2.0), in our own words. What
came and what went, and what the original does without a word: examples/ports/README.md.
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
from transformers import AutoTokenizer, PreTrainedTokenizerBase, get_cosine_schedule_with_warmup

import fsdp_sft as fs

Batch = dict[str, torch.Tensor]
Row = dict[str, torch.Tensor]


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Supervised fine-tuning on batches without padding")
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder or Hub id")
    add("--data", type=Path, required=True, help=".jsonl of rows with messages, or with input_ids, loss_mask")
    add("--val", type=Path, help="the same, to evaluate")
    add("--output", type=Path, default=Path("checkpoints"))
    add("--max-length", type=int, default=1024)
    add("--train-batch-size", type=int, default=256, help="rows of a step, over all ranks")
    add("--micro-batch-size-per-gpu", type=int, default=4)
    add("--total-epochs", type=int, default=1)
    add("--lr", type=float, default=1e-5)
    add("--weight-decay", type=float, default=0.01)
    add("--lr-warmup-steps-ratio", type=float, default=0.0)
    add("--clip-grad", type=float, default=1.0)
    add("--test-freq", type=int, help="steps between evaluations")
    add("--save-freq", type=int, help="steps between checkpoints")
    add("--resume", action="store_true", help="from the newest sound checkpoint in --output")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="compute; masters are float32")
    add("--first-tokens", choices=["skip", "cross"], default="skip", help="cross: as the original does")
    return parser.parse_args(words)


def read_rows(path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Row]:
    """Verl's rows: ids, a mask of the tokens that are trained, positions; none of it shifted."""
    rows = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "messages" in row:
            chat = fs.encode_chat(row, tokenizer, max_length=max_length, on_dropped="count")
            mask = [int(label != fs.IGNORE_INDEX) for label in chat.labels]
            row = {"input_ids": chat.input_ids, "loss_mask": mask}
        columns = {name: torch.tensor(row[name][:max_length]) for name in ("input_ids", "loss_mask")}
        rows.append(columns | {"position_ids": torch.arange(len(columns["input_ids"]))})
    return rows


def collate(rows: list[Row]) -> Batch:
    """Verl's batch for ``pad_mode=no_padding``: each column is a nested tensor."""
    return {
        name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged)
        for name in rows[0]
    }


class TokenLoss:
    """verl's loss over the log-probabilities of a batch's tokens, one row after the other.

    Args:
        first_tokens: ``"cross"``: the last token of a row predicts the first of the next one, if that is
            trained, as verl's rolled mask has it. ``"skip"``: nothing predicts a row's first token.
    """

    def __init__(self, first_tokens: str) -> None:
        self.first_tokens = first_tokens

    def targets(self, batch: Batch) -> torch.Tensor:
        """Target of each token of the batch, ``(tokens,)``."""
        ids, mask = batch["input_ids"], batch["loss_mask"].values()
        targets = ids.values().masked_fill(mask == 0, fs.IGNORE_INDEX).roll(-1)
        if self.first_tokens == "skip":
            targets[ids.offsets()[1:] - 1] = fs.IGNORE_INDEX
        return targets

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        flat = {name: batch[name].values()[None] for name in ("input_ids", "position_ids")}
        log_probs = -fs.token_losses(model, flat | {"shift_labels": self.targets(batch)[None]})
        return -log_probs.sum()

    def count(self, batch: Batch) -> int:
        return int((self.targets(batch) != fs.IGNORE_INDEX).sum())


def train(args: argparse.Namespace) -> list[fs.StepResult]:
    """Train, evaluate, save and export; returns what each step did."""
    context = fs.init_distributed()
    fs.check_export(args.output / "huggingface")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32)
    model = fs.load_pretrained(args.model, mesh=fs.build_mesh(), mp_policy=policy)
    rows = read_rows(args.data, tokenizer, args.max_length)
    sampler = fs.ResumableSampler(rows)
    size = args.micro_batch_size_per_gpu
    loader: DataLoader[Any] = DataLoader(rows, size, sampler=sampler, collate_fn=collate)
    val_rows = read_rows(args.val, tokenizer, args.max_length) if args.val else []
    val_loader = DataLoader(val_rows[context.rank :: context.world_size], size, collate_fn=collate)
    grad_accum_steps = args.train_batch_size // (context.world_size * size)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    total_steps = args.total_epochs * -(-len(loader) // grad_accum_steps)
    warmup_steps = int(args.lr_warmup_steps_ratio * total_steps)
    scheduler = get_cosine_schedule_with_warmup(optimizer, warmup_steps, total_steps)
    step = 0
    if args.resume:
        loaded = fs.load_checkpoint(args.output, model=model, optimizer=optimizer)
        step = loaded.step
        scheduler.load_state_dict(loaded.train_state["scheduler"])
        sampler.load_state_dict(loaded.train_state["sampler"])
    objective = TokenLoss(args.first_tokens)
    loss: dict[str, Any] = {"loss_fn": objective.loss, "count_fn": objective.count}
    logger = fs.MetricLogger(jsonl=args.output / "log.jsonl")
    results = []
    while sampler.epoch < args.total_epochs:
        for window in fs.windows(loader, grad_accum_steps):
            options = {"max_grad_norm": args.clip_grad, "scheduler": scheduler, **loss}
            result = fs.train_step(model, window, optimizer, **options)
            step += 1
            results.append(result)
            logger.log({"train/loss": result.loss, "train/grad_norm": result.grad_norm}, step)
            if val_rows and (step == total_steps or (args.test_freq and step % args.test_freq == 0)):
                logger.log({"val/loss": fs.evaluate(model, val_loader, **loss).loss}, step)
            if args.save_freq and step % args.save_freq == 0:
                state = {"scheduler": scheduler.state_dict(), "sampler": sampler.state_dict()}
                fs.save_checkpoint(args.output, step, model=model, optimizer=optimizer, train_state=state)
    fs.export_hf(model, args.output / "huggingface", tokenizer=tokenizer)
    return results


def main() -> None:
    train(parse_arguments())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

r"""OpenRLHF's SFT and DPO, ported: batches that are tuples, and a reference model.

    torchrun --standalone --nproc-per-node 2 examples/ports/openrlhf_sft_dpo.py dpo --model FOLDER \
        --data pairs.jsonl

After openrlhf/trainer/sft_trainer.py and dpo_trainer.py of https://github.com/OpenRLHF/OpenRLHF (Apache-2.0),
in our own words. What came and what went, and what the originals do without a word:
examples/ports/README.md.

A row of ``sft`` has a prompt and a response, one of ``dpo`` a prompt, a chosen and a rejected response.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, get_scheduler

import fsdp_sft as fs

Tokens = tuple[list[int], int]  # ids, and how many of them are the prompt
Answers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids, attention mask, mask of the answer's tokens
Encode = Callable[[str, str], Tokens]
Metrics = dict[str, torch.Tensor]


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tuning on answers, or on pairs of them")
    add = parser.add_argument
    add("task", choices=["sft", "dpo"])
    add("--model", required=True, help="Hugging Face folder or Hub id")
    add("--ref-model", help="reference model of dpo; --model if left out")
    add("--data", type=Path, required=True, help=".jsonl of prompts with responses, or with pairs of them")
    add("--eval", type=Path, help="the same, to evaluate")
    add("--output", type=Path, default=Path("ckpt"))
    add("--max-len", type=int, default=512)
    add("--batch-size", type=int, default=128, help="rows of a step, over all ranks")
    add("--micro-batch-size", type=int, default=8, help="rows per rank")
    add("--max-epochs", type=int, default=1)
    add("--lr", type=float, default=1e-5)
    add("--lr-warmup-ratio", type=float, default=0.03)
    add("--max-norm", type=float, default=1.0)
    add("--beta", type=float, default=0.1)
    add("--label-smoothing", type=float, default=0.0)
    add("--nll-loss-coef", type=float, default=0.0)
    add("--save-steps", type=int, help="steps between checkpoints")
    add("--resume", action="store_true", help="from the newest sound checkpoint in --output")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="compute; masters are float32")
    return parser.parse_args(words)


class Encoder:
    """Tokens of a prompt and its answer, which ends with the token that ends a text."""

    def __init__(self, tokenizer: Any, max_len: int) -> None:
        self.tokenizer, self.max_len = tokenizer, max_len

    def __call__(self, prompt: str, answer: str) -> Tokens:
        start, rest = (
            self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer)
        )
        return [*start, *rest, self.tokenizer.eos_token_id][: self.max_len], len(start)


def answers(rows: list[Tokens]) -> Answers:
    """Padded on the right."""
    ids = pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
    attention = pad_sequence([torch.ones(len(ids), dtype=torch.long) for ids, _ in rows], batch_first=True)
    scored = attention.float()
    for row, (_, prompt_length) in zip(scored, rows, strict=True):
        row[:prompt_length] = 0
    return ids, attention, scored


def log_probs(model: nn.Module, batch: Answers) -> torch.Tensor:
    """Of each token of the answers, float32 ``(B, S)``; 0 elsewhere."""
    ids, attention, scored = batch
    labels = ids.masked_fill(scored == 0, fs.IGNORE_INDEX)
    return -fs.token_losses(model, {"input_ids": ids, "attention_mask": attention, "labels": labels})


class Sft:
    """The mean over the answers' tokens."""

    def collate(self, encode: Encode, rows: list[dict[str, str]]) -> Answers:
        return answers([encode(row["prompt"], row["response"]) for row in rows])

    def loss(self, model: nn.Module, batch: Answers) -> torch.Tensor:
        return -log_probs(model, batch).sum()

    def count(self, batch: Answers) -> float:
        return float(batch[2][:, 1:].sum())


class Dpo:
    """The mean over pairs of chosen and rejected answers, beside those of a reference model."""

    def __init__(self, reference: nn.Module, args: argparse.Namespace) -> None:
        self.reference, self.beta = reference, args.beta
        self.label_smoothing, self.nll_loss_coef = args.label_smoothing, args.nll_loss_coef

    def collate(self, encode: Encode, rows: list[dict[str, str]]) -> Answers:
        """The chosen answers, and after them the rejected ones, so that one forward has them all."""
        return answers([encode(row["prompt"], row[name]) for name in ("chosen", "rejected") for row in rows])

    def loss(self, model: nn.Module, batch: Answers) -> tuple[torch.Tensor, Metrics]:
        policy = log_probs(model, batch).sum(-1)
        with torch.no_grad():
            known = log_probs(self.reference, batch).sum(-1)
        chosen, rejected = (self.beta * (policy - known)).chunk(2)
        right, wrong = F.logsigmoid(chosen - rejected), F.logsigmoid(rejected - chosen)
        preference = -(right * (1 - self.label_smoothing) + wrong * self.label_smoothing).sum()
        nll = -(policy / batch[2][:, 1:].sum(-1)).chunk(2)[0].sum()
        metrics = {
            "acc": (chosen > rejected).sum(),
            "chosen_reward": chosen.sum(),
            "reject_reward": rejected.sum(),
            "nll_loss": nll,
        }
        return preference + self.nll_loss_coef * nll, metrics

    def count(self, batch: Answers) -> int:
        return len(batch[0]) // 2


def train(args: argparse.Namespace) -> list[fs.StepResult]:
    """Train, evaluate, save and export; returns what each step did."""
    context = fs.init_distributed()
    fs.check_export(args.output / "export")
    mesh, tokenizer = fs.build_mesh(), AutoTokenizer.from_pretrained(args.model)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32)
    model = fs.load_pretrained(args.model, mesh=mesh, mp_policy=policy)
    task: Sft | Dpo = Sft()
    if args.task == "dpo":
        reference = fs.load_pretrained(args.ref_model or args.model, mesh=mesh, mp_policy=policy)
        task = Dpo(reference.eval(), args)

    encode = Encoder(tokenizer, args.max_len)

    def collate(rows: list[dict[str, str]]) -> Answers:
        return task.collate(encode, rows)

    rows, eval_rows = (
        [json.loads(line) for line in path.read_text().splitlines()] if path else []
        for path in (args.data, args.eval)
    )
    rows = [row for row in rows if encode(row["prompt"], "")[1] < args.max_len - 2]
    sampler = fs.ResumableSampler(rows, seed=42)
    size = args.micro_batch_size
    loader: DataLoader[Any] = DataLoader(rows, size, sampler=sampler, collate_fn=collate)
    eval_loader = DataLoader(eval_rows[context.rank :: context.world_size], size, collate_fn=collate)
    accumulated_gradient = args.batch_size // size // context.world_size

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    total_steps = args.max_epochs * -(-len(loader) // accumulated_gradient)
    scheduler = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        math.ceil(total_steps * args.lr_warmup_ratio),
        total_steps,
        scheduler_specific_kwargs={"min_lr_rate": 0.1},
    )
    step = 0
    if args.resume:
        loaded = fs.load_checkpoint(args.output, model=model, optimizer=optimizer)
        step = loaded.step
        scheduler.load_state_dict(loaded.train_state["scheduler"])
        sampler.load_state_dict(loaded.train_state["sampler"])
    loss: dict[str, Any] = {"loss_fn": task.loss, "count_fn": task.count}
    logger = fs.MetricLogger(jsonl=args.output / "log.jsonl")
    results = []
    while sampler.epoch < args.max_epochs:
        for window in fs.windows(loader, accumulated_gradient):
            options = {"max_grad_norm": args.max_norm, "scheduler": scheduler, **loss}
            result = fs.train_step(model, window, optimizer, **options)
            step += 1
            results.append(result)
            logger.log({"loss": result.loss, "grad_norm": result.grad_norm, **result.metrics}, step)
            if args.save_steps and step % args.save_steps == 0:
                state = {"scheduler": scheduler.state_dict(), "sampler": sampler.state_dict()}
                fs.save_checkpoint(args.output, step, model=model, optimizer=optimizer, train_state=state)
        if eval_rows:
            evaluation = fs.evaluate(model, eval_loader, **loss)
            logger.log({"eval_loss": evaluation.loss, **evaluation.metrics}, step)
    fs.export_hf(model, args.output / "export", tokenizer=tokenizer)
    return results


def main() -> None:
    train(parse_arguments())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

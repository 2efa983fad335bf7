r"""transformers' run_clm_no_trainer, ported: texts in blocks of equal length, every token a target.

    torchrun --standalone --nproc-per-node 2 examples/ports/run_clm_no_trainer.py --model FOLDER \
        --train-file train.txt --validation-file validation.txt --output-dir out

After examples/pytorch/language-modeling/run_clm_no_trainer.py of https://github.com/huggingface/transformers
(Apache-2.0), in our own words. What came and what went, and what the original does without a word:
examples/ports/README.md.
"""

import argparse
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, default_data_collator, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

import fsdp_sft as fs

NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model on a text file")
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder or Hub id")
    add("--train-file", type=Path, required=True, help="one text a line")
    add("--validation-file", type=Path, required=True)
    add("--output-dir", type=Path, required=True)
    add("--block-size", type=int, default=1024, help="tokens per row")
    add("--per-device-train-batch-size", type=int, default=8)
    add("--per-device-eval-batch-size", type=int, default=8)
    add("--gradient-accumulation-steps", type=int, default=1)
    add("--num-train-epochs", type=int, default=3)
    add("--learning-rate", type=float, default=5e-5)
    add("--weight-decay", type=float, default=0.0)
    add("--lr-scheduler-type", default="linear")
    add("--num-warmup-steps", type=int, default=0, help="optimizer steps")
    add("--checkpointing-steps", type=int, help="optimizer steps between checkpoints")
    add("--resume-from-checkpoint", action="store_true", help="the newest sound one in --output-dir")
    add("--mixed-precision", choices=["no", "bf16"], default="bf16", help="compute; masters are float32")
    add("--weigh", choices=["targets", "batches"], default="targets", help="batches: as the original does")
    add("--seed", type=int, default=0)
    return parser.parse_args(words)


def group_texts(texts: list[str], tokenizer: AutoTokenizer, block_size: int) -> list[dict[str, list[int]]]:
    """All texts one after the other, cut into blocks; what is left at the end is dropped."""
    ids = list(chain.from_iterable(tokenizer(texts)["input_ids"]))
    starts = range(0, len(ids) - block_size + 1, block_size)
    blocks = [ids[start : start + block_size] for start in starts]
    return [{"input_ids": block, "labels": block} for block in blocks]


def grouped_parameters(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: biases and norms are not decayed."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


def models_own(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The original's loss: the batch's mean, as transformers computes it from the labels."""
    return model(**batch).loss


def one(batch: dict[str, torch.Tensor]) -> int:
    return 1


WEIGHING = {"targets": {}, "batches": {"loss_fn": models_own, "count_fn": one}}


def train(args: argparse.Namespace) -> list[fs.StepResult]:
    """Train, evaluate after each epoch, export; returns what each step did."""
    context = fs.init_distributed()
    export_to, checkpoints = args.output_dir / "export", args.output_dir / "checkpoints"
    fs.check_export(export_to)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    compute = torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32
    model = fs.load_pretrained(
        args.model,
        mesh=fs.build_mesh(),
        mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
        new_vocab_size=len(tokenizer),  # rows for tokens that the model has none for, if there are any
    )

    train_rows, eval_rows = (
        group_texts(path.read_text().splitlines(), tokenizer, args.block_size)
        for path in (args.train_file, args.validation_file)
    )
    sampler = fs.ResumableSampler(train_rows, seed=args.seed)
    loader = DataLoader(
        train_rows, args.per_device_train_batch_size, sampler=sampler, collate_fn=default_data_collator
    )
    mine = eval_rows[context.rank :: context.world_size]
    eval_loader = DataLoader(mine, args.per_device_eval_batch_size, collate_fn=default_data_collator)

    optimizer = torch.optim.AdamW(grouped_parameters(model, args.weight_decay), lr=args.learning_rate)
    steps_per_epoch = -(-len(loader) // args.gradient_accumulation_steps)
    scheduler = get_scheduler(
        args.lr_scheduler_type, optimizer, args.num_warmup_steps, args.num_train_epochs * steps_per_epoch
    )
    step = 0
    if args.resume_from_checkpoint:
        loaded = fs.load_checkpoint(checkpoints, model=model, optimizer=optimizer)
        step = loaded.step
        scheduler.load_state_dict(loaded.train_state["scheduler"])
        sampler.load_state_dict(loaded.train_state["sampler"])
    logger = fs.MetricLogger(jsonl=args.output_dir / "log.jsonl")
    options = {"max_grad_norm": None, **WEIGHING[args.weigh]}  # the original does not clip
    results = []
    while sampler.epoch < args.num_train_epochs:
        for window in fs.windows(loader, args.gradient_accumulation_steps):
            result = fs.train_step(model, window, optimizer, scheduler=scheduler, **options)
            step += 1
            results.append(result)
            logger.log({"train_loss": result.loss}, step)
            if args.checkpointing_steps and step % args.checkpointing_steps == 0:
                state = {"scheduler": scheduler.state_dict(), "sampler": sampler.state_dict()}
                fs.save_checkpoint(checkpoints, step, model=model, optimizer=optimizer, train_state=state)
        evaluation = fs.evaluate(model, eval_loader)
        logger.log({"eval_loss": evaluation.loss, "perplexity": evaluation.perplexity}, step)
    fs.export_hf(model, export_to, tokenizer=tokenizer)
    return results


def main() -> None:
    train(parse_arguments())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

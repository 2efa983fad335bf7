"""The ports, how each is called, and what it is compared with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import fsdp_sft as fs
from tests.harness.places import EXAMPLES, script
from tests.ports.originals import (
    SAVED,
    STEPS,
    Batch,
    Scaled,
    Window,
    cosine,
    cosine_to_a_tenth,
    linear,
    of_nested,
    of_pack,
    of_padded,
    of_tuple,
    open_instruct,
    openrlhf_dpo,
    openrlhf_sft,
    prime_rl,
    verl,
    warmup,
)

PORTS = EXAMPLES / "ports"

Steps = list[tuple[float, float]]  # loss and norm of the gradient


@dataclass(frozen=True)
class Port:
    """A port, how it is called, and the original's part of it.

    Attributes:
        name: Its module.
        words: Its arguments beside those of files.
        rows_of: Rows of one of its batches.
        original: The original's loss.
        schedule: The original's scheduler.
        optimizer: Options of AdamW.
        clip: Largest norm of the gradient.
        extra: What the original's loss gets beside model and window.
        accumulates: Whether its option of accumulation is that of a rank, not of all.
        evaluates: Its option of rows to evaluate, and the name of the loss in its log; None if it has none.
    """

    name: str
    words: str
    rows_of: Callable[[Any], Batch]
    original: Callable[[nn.Module, Window, Any], Scaled]
    schedule: Callable[[Any], Any]
    optimizer: dict[str, Any]
    clip: float = 1.0
    extra: Any = None
    accumulates: bool = False
    evaluates: tuple[str, str] | None = None


OPEN_INSTRUCT = "--per-device-train-batch-size 2 --num-train-epochs 2 --learning-rate 1e-3 --warmup-ratio 0.2"
_OPENRLHF = "--batch-size 8 --micro-batch-size 2 --max-epochs 2 --lr 1e-3 --lr-warmup-ratio 0.1"
_VERL = "--train-batch-size 8 --micro-batch-size-per-gpu 2 --total-epochs 2 --lr 1e-3"

PRIME_RL = Port(
    "prime_rl_sft",
    f"--seq-len 64 --batch-size 4 --max-steps {STEPS} --lr 1e-3 --warmup-steps 3 --ckpt-interval {SAVED} "
    f"--val-interval {STEPS}",
    of_pack,
    prime_rl,
    warmup,
    {"weight_decay": 0.01},
    evaluates=("--val", "val_loss"),
)
VERL = Port(
    "verl_sft",
    f"{_VERL} --lr-warmup-steps-ratio 0.2 --save-freq {SAVED}",
    of_nested,
    verl,
    cosine,
    {"weight_decay": 0.01},
    evaluates=("--val", "val/loss"),
)
MEAN, SUM = (
    Port(
        "open_instruct_finetune",
        f"{OPEN_INSTRUCT} --clip-grad-norm {clip} --reduce-loss {reduce_loss} --checkpointing-steps {SAVED}",
        of_padded,
        open_instruct,
        linear,
        {"weight_decay": 0.0},
        clip,
        reduce_loss,
        accumulates=True,
    )
    for reduce_loss, clip in (("mean", 0.5), ("sum", 5.0))
)
SFT = Port(
    "openrlhf_sft_dpo",
    f"sft {_OPENRLHF} --save-steps {SAVED}",
    of_tuple,
    openrlhf_sft,
    cosine_to_a_tenth,
    {"betas": (0.9, 0.95), "weight_decay": 0.0},
    evaluates=("--eval", "eval_loss"),
)
DPO = Port(
    "openrlhf_sft_dpo",
    f"dpo {_OPENRLHF} --save-steps {SAVED} --beta 0.5 --label-smoothing 0.1 --nll-loss-coef 0.2",
    of_tuple,
    openrlhf_dpo,
    cosine_to_a_tenth,
    {"betas": (0.9, 0.95), "weight_decay": 0.0},
    evaluates=("--eval", "eval_loss"),
)


def data_of(port: Port) -> str:
    """The file of its rows."""
    if port.name != "openrlhf_sft_dpo":
        return "chats.jsonl"
    return "answers.jsonl" if port is SFT else "pairs.jsonl"


def run(port: Port, folder: Path, data: str, out: Path, *more: str) -> tuple[list[fs.StepResult], list[Any]]:
    """What the port's steps did, and the rows of this rank's window of each."""
    module, windows = script(port.name, PORTS), []
    words = [*port.words.split(), "--dtype", "float32", "--output", str(out), *more]
    if port.accumulates:
        words += ["--gradient-accumulation-steps", str(4 // dist.get_world_size())]
    if port.evaluates is not None:
        words += [port.evaluates[0], str(folder / data)]
    train_step = fs.train_step

    def recording(model: nn.Module, window: list[Any], *args: Any, **options: Any) -> Any:
        windows.append([port.rows_of(batch) for batch in window])
        return train_step(model, window, *args, **options)

    with mock.patch.object(fs, "train_step", recording):
        args = module.parse_arguments(
            [*words, "--model", str(folder / "model"), "--data", str(folder / data)]
        )
        return module.train(args), windows


def plain(port: Port, folder: Path) -> nn.Module:
    """The model; open-instruct gives it rows for tokens that only the tokenizer has, the others' mean."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    known, tokens = model.config.vocab_size, len(AutoTokenizer.from_pretrained(folder / "model"))
    if port.name == "open_instruct_finetune":
        model.resize_token_embeddings(tokens, mean_resizing=False)
        with torch.no_grad():
            embedding = model.get_input_embeddings().weight
            embedding[known:] = embedding[:known].double().mean(0)
    return model


def train_original(
    port: Port, folder: Path, windows: list[Window]
) -> tuple[nn.Module, list[tuple[float, float]]]:
    model, reference = plain(port, folder), plain(port, folder)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, **port.optimizer)
    scheduler = port.schedule(optimizer)
    steps = []
    for window in windows:
        logged = 0.0
        for loss, share in port.original(model, window, port.extra or reference):
            loss.backward()
            logged += share
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), port.clip)
        steps.append((logged, float(norm)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, steps


def check_steps(results: list[Any], expected: Steps) -> None:
    """Losses are the same within 1e-6, norms of the gradient within 3e-6."""
    assert len(results) == len(expected)
    for index, (name, tolerance) in enumerate((("loss", 1e-6), ("grad_norm", 3e-6))):
        actual, wanted = [getattr(result, name) for result in results], [step[index] for step in expected]
        assert actual == pytest.approx(wanted, rel=tolerance), f"{name}: {actual} for {wanted}"


def across(ranks: list[tuple[list[fs.StepResult], list[Any]]]) -> tuple[list[fs.StepResult], list[Window]]:
    """The steps, which are the same on all ranks, and the windows of all ranks."""
    (results, _), *others = ranks
    assert all(other == results for other, _ in others)
    return results, [list(window) for window in zip(*(windows for _, windows in ranks), strict=True)]

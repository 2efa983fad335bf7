"""The ports, how each is called, and what it is compared with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import fsdp_sft as fs
from tests.harness.places import EXAMPLES, script
from tests.plain import step
from tests.ports.originals import (
    SAVED,
    STEPS,
    Batch,
    Scaled,
    Window,
    cosine,
    of_nested,
    of_pack,
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
        evaluates: Its option of rows to evaluate, and the name of the loss in its log.
    """

    name: str
    words: str
    rows_of: Callable[[Any], Batch]
    original: Callable[[nn.Module, Window], Scaled]
    schedule: Callable[[Any], Any]
    evaluates: tuple[str, str]


_VERL = "--train-batch-size 8 --micro-batch-size-per-gpu 2 --total-epochs 2 --lr 1e-3"

PRIME_RL = Port(
    "prime_rl_sft",
    f"--seq-len 64 --batch-size 4 --max-steps {STEPS} --lr 1e-3 --warmup-steps 3 --ckpt-interval {SAVED} "
    f"--val-interval {STEPS}",
    of_pack,
    prime_rl,
    warmup,
    ("--val", "val_loss"),
)
VERL = Port(
    "verl_sft",
    f"{_VERL} --lr-warmup-steps-ratio 0.2 --save-freq {SAVED}",
    of_nested,
    verl,
    cosine,
    ("--val", "val/loss"),
)


def run(port: Port, folder: Path, data: str, out: Path, *more: str) -> tuple[list[fs.StepResult], list[Any]]:
    """What the port's steps did, and the rows of this rank's window of each."""
    module, windows = script(port.name, PORTS), []
    words = [
        *port.words.split(),
        "--dtype",
        "float32",
        "--output",
        str(out),
        port.evaluates[0],
        str(folder / data),
        *more,
    ]
    train_step = fs.train_step

    def recording(model: nn.Module, window: list[Any], *args: Any, **options: Any) -> Any:
        windows.append([port.rows_of(batch) for batch in window])
        return train_step(model, window, *args, **options)

    with mock.patch.object(fs, "train_step", recording):
        args = module.parse_arguments(
            [*words, "--model", str(folder / "model"), "--data", str(folder / data)]
        )
        return module.train(args), windows


def plain(folder: Path) -> nn.Module:
    """The model that both begin with."""
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def train_original(
    port: Port, folder: Path, windows: list[Window]
) -> tuple[nn.Module, list[tuple[float, float]]]:
    model = plain(folder)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = port.schedule(optimizer)
    steps = []
    for window in windows:
        shares: list[float] = []

        def losses(window: Window = window, shares: list[float] = shares) -> Iterator[torch.Tensor]:
            for loss, share in port.original(model, window):
                shares.append(share)
                yield loss

        _, norm = step(model, losses(), [optimizer], max_norm=1.0)
        steps.append((sum(shares), norm))
        scheduler.step()
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
    assert all(repr(other) == repr(results) for other, _ in others)  # a nan in them equals no other
    return results, [list(window) for window in zip(*(windows for _, windows in ranks), strict=True)]

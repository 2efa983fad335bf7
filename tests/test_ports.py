"""The port of run_clm_no_trainer (examples/ports) against the original's loop, written down with torch alone.

On one rank losses in float32 are bitwise the original's; on two within 1e-6, since sums over ranks have
another order. Only the order of the rows is taken from the library, so that both see the same data.
"""

import itertools
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler

from tests import plain
from tests.harness.places import EXAMPLES, script
from tests.harness.ranks import run_distributed

Loss = Callable[[nn.Module, Any], torch.Tensor]
PORTS = EXAMPLES / "ports"


Steps = list[tuple[float, float]]  # loss and norm of the gradient


def _check(results: list[Any], expected: Steps) -> None:
    actual = [(result.loss, result.grad_norm) for result in results]
    assert len(actual) == len(expected) > 2
    _check_numbers([loss for loss, _ in actual], [loss for loss, _ in expected])
    _check_numbers([norm for _, norm in actual], [norm for _, norm in expected])


def _check_numbers(actual: list[float], expected: list[float]) -> None:
    same = expected if dist.get_world_size() == 1 else pytest.approx(expected, rel=1e-6)
    assert actual == same, f"{actual} for {expected}"


def _rounds(rows: list[Any], size: int, collate: Any, *, epochs: int) -> Iterator[list[Any]]:
    """The batches of all ranks, one round after the other."""
    import fsdp_sft as fs

    ranks = dist.get_world_size()
    samplers = [fs.ResumableSampler(rows, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(rows, size, sampler=sampler, collate_fn=collate) for sampler in samplers]
        yield from map(list, zip(*loaders, strict=True))


def _steps(
    model: nn.Module,
    rounds: Iterator[list[Any]],
    grad_accum_steps: int,
    loss_of: Loss,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
) -> Steps:
    """A mean of means: each batch's loss over the number of micro-batches, gradients averaged over ranks."""
    steps = []
    while window := list(itertools.islice(rounds, grad_accum_steps)):
        parts = grad_accum_steps * dist.get_world_size()
        losses = (loss_of(model, batch) / parts for batch in itertools.chain(*window))
        steps.append(plain.step(model, losses, [optimizer], max_norm=float("inf")))
        scheduler.step()
    return steps


def _logged(path: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row[name] for row in rows if name in row]


# transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, chats, and texts that make 16 blocks of 16 tokens to train on and 5 to evaluate."""
    folder = tmp_path_factory.mktemp("ports")
    turns = [(f"What is {i} and {i}?", f"It is {2 * i}" + " indeed" * (i % 5)) for i in range(8)]
    texts = [text for turn in turns for text in turn]
    script("tiny_model", EXAMPLES).make_tiny_model(folder / "model", texts)
    port, tokenizer = script("run_clm_no_trainer", PORTS), AutoTokenizer.from_pretrained(folder / "model")
    for name, number in (("train", 16), ("validation", 5)):
        lines = texts * 8
        while len(port.group_texts(lines, tokenizer, 16)) > number:
            lines.pop()
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return folder


def _clm_arguments(folder: Path, out: Path, *more: str) -> Namespace:
    files = ["--train-file", str(folder / "train.txt"), "--validation-file", str(folder / "validation.txt")]
    sizes = ["--block-size", "16", "--per-device-train-batch-size", "2", "--num-train-epochs", "2"]
    settings = ["--weight-decay", "0.1", "--num-warmup-steps", "1", "--mixed-precision", "no"]
    words = ["--model", str(folder / "model"), *files, "--output-dir", str(out), *sizes, *settings, *more]
    return script("run_clm_no_trainer", PORTS).parse_arguments(words)


def _clm(folder: Path, out: Path) -> None:
    port = script("run_clm_no_trainer", PORTS)
    # All blocks have as many targets, so weighing them by target is the original's loss but for its rounding.
    weigh = "batches" if dist.get_world_size() == 1 else "targets"
    args = _clm_arguments(folder, out, "--gradient-accumulation-steps", "2", "--weigh", weigh)
    results = port.train(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = port.group_texts(args.train_file.read_text().splitlines(), tokenizer, 16)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    # The tokenizer has a token more than the model (Qwen2's end of text): its embedding grows, as in the
    # original.
    known = model.config.vocab_size
    assert len(tokenizer) == known + 1
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[known:] = embedding[:known].double().mean(0)
    norms = {name for name, _ in model.named_parameters() if "norm" in name or "bias" in name}
    groups = [
        {"params": [p for n, p in model.named_parameters() if n not in norms], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n in norms], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)
    scheduler = get_scheduler("linear", optimizer, 1, 2 * 4 // dist.get_world_size())
    rounds = _rounds(rows, 2, default_data_collator, epochs=2)
    expected = _steps(model, rounds, 2, lambda m, b: m(**b).loss, optimizer, scheduler)
    _check(results, expected)

    # So is the original's evaluation, a mean over rows.
    rows = port.group_texts(args.validation_file.read_text().splitlines(), tokenizer, 16)
    with torch.no_grad():
        means = [float(model.eval()(**default_data_collator([row])).loss) for row in rows]
    if dist.get_rank() == 0:
        assert _logged(out / "log.jsonl", "eval_loss")[-1] == pytest.approx(sum(means) / len(means), rel=1e-5)
    assert (out / "export" / "model.safetensors").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_clm_trains_as_the_original(ranks: int, folder: Path, tmp_path: Path) -> None:
    run_distributed(_clm, ranks, folder, tmp_path)

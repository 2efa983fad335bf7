"""Each port beside the original's loop: ten steps on two ranks, resumed on one, evaluated, exported."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    default_data_collator,
    get_cosine_schedule_with_warmup,
    get_scheduler,
)

import fsdp_sft as fs
from tests import plain
from tests.harness.places import EXAMPLES, script
from tests.harness.ranks import on_ranks, run_distributed

# --- loops of prime-rl and verl in torch alone: losses and schedules ---------------------------------------

# Only which rows a step has is taken from the port. The oracle gets them without packing, padding or nesting,
# each row in a forward of its own, and scales, clips and schedules as the original does.
STEPS, SAVED = 10, 6  # the checkpoint is in the middle of the second of two epochs

TURNS = [(f"What is {i} and {i}?", f"It is {2 * i}" + " indeed" * (i % 5)) for i in range(40)]


class Row(NamedTuple):
    """Tokens of a row, and the places of those that are trained."""

    ids: tuple[int, ...]
    scored: tuple[int, ...]


Batch = list[Row]
Window = list[list[Batch]]  # a step's batches, of each rank


# Rows of the ports' batches


def of_pack(batch: Any) -> Batch:
    """Of prime-rl's packs, which have shifted targets; the filler has none."""
    ids, targets, mask, positions = (
        batch[name][0].tolist() for name in ("input_ids", "target_ids", "loss_mask", "position_ids")
    )
    starts = [i for i, position in enumerate(positions) if position == 0]
    rows = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        scored = tuple(i + 1 for i in range(end - start) if mask[start + i])
        if scored:
            rows.append(Row((*ids[start:end], targets[end - 1]), scored))
    return rows


def of_nested(batch: Any) -> Batch:
    return [
        Row(tuple(ids.tolist()), tuple(mask.nonzero()[:, 0].tolist()))
        for ids, mask in zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True)
    ]


# The originals' losses: each yields what a micro-batch's backward is called on and what it adds to the log

Scaled = Iterator[tuple[torch.Tensor, float]]


def scored(model: nn.Module, row: Row) -> torch.Tensor:
    """Log-probabilities of the trained tokens of a row."""
    ids, places = torch.tensor(row.ids), torch.tensor(row.scored)
    log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return log_probs[places - 1].gather(-1, ids[places, None])[:, 0]


def prime_rl(model: nn.Module, window: Window) -> Scaled:
    """Sums over the number of micro-batches, averaged over ranks; then all gradients by one factor."""
    count, micro_batches = sum(len(row.scored) for row in all_rows(window)), len(window[0])
    for batch in batches_of(window):
        total = torch.stack([-scored(model, row).sum() for row in batch]).sum()
        yield total / micro_batches / len(window), float(total.detach()) / count
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(len(window) * micro_batches / count)


def verl(model: nn.Module, window: Window) -> Scaled:
    """The tokens of a batch one after the other; ids and mask are rolled over the borders of its rows."""
    tokens = sum(len(row.scored) for row in all_rows(window))
    for batch in batches_of(window):
        logits = torch.cat([model(torch.tensor([row.ids])).logits[0] for row in batch])
        ids = torch.tensor([i for row in batch for i in row.ids])
        mask = torch.tensor([float(i in row.scored) for row in batch for i in range(len(row.ids))])
        log_probs = logits.log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[:, 0]
        loss = -(log_probs * mask.roll(-1)).sum() / tokens * len(window)
        yield loss / len(window), float(loss.detach()) / len(window)


def batches_of(window: Window) -> list[Batch]:
    return [batch for rank in window for batch in rank]


def all_rows(window: Window) -> list[Row]:
    return [row for batch in batches_of(window) for row in batch]


# --- a port beside its original ----------------------------------------------------------------------------


class Port(NamedTuple):
    """A port, how it is called, and the original's part of it."""

    module: str
    words: str  # its arguments beside those of files
    rows_of: Callable[[Any], Batch]  # rows of one of its batches
    original: Callable[[nn.Module, Window], Scaled]
    schedule: Callable[[Any], Any]
    evaluation: str  # the name of this loss in its log


PRIME_RL = Port(
    "prime_rl_sft",
    f"--seq-len 64 --batch-size 4 --max-steps {STEPS} --lr 1e-3 --warmup-steps 3 --ckpt-interval {SAVED} "
    f"--val-interval {STEPS}",
    of_pack,
    prime_rl,
    partial(torch.optim.lr_scheduler.LinearLR, start_factor=1e-8, total_iters=3),
    "val_loss",
)
VERL = Port(
    "verl_sft",
    "--train-batch-size 8 --micro-batch-size-per-gpu 2 --total-epochs 2 --lr 1e-3 "
    f"--lr-warmup-steps-ratio 0.2 --save-freq {SAVED}",
    of_nested,
    verl,
    partial(get_cosine_schedule_with_warmup, num_warmup_steps=2, num_training_steps=STEPS),
    "val/loss",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and chats."""
    folder = tmp_path_factory.mktemp("ports")
    script("tiny_model", EXAMPLES).make_tiny_model(folder / "model", [text for row in TURNS for text in row])
    chats = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
        for ask, answer in TURNS
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder


def _run(port: Port, folder: Path, out: Path, *more: str) -> tuple[list[fs.StepResult], list[Any]]:
    """What the port's steps did, and the rows of this rank's window of each."""
    module, windows = script(port.module, EXAMPLES / "ports"), []
    data = str(folder / "chats.jsonl")
    files = ["--output", str(out), "--val", data, "--model", str(folder / "model"), "--data", data]
    train_step = fs.train_step

    def recording(model: nn.Module, window: list[Any], *args: Any, **options: Any) -> Any:
        windows.append([port.rows_of(batch) for batch in window])
        return train_step(model, window, *args, **options)

    with mock.patch.object(fs, "train_step", recording):
        args = module.parse_arguments([*port.words.split(), "--dtype", "float32", *files, *more])
        return module.train(args), windows


def _on_ranks(ranks: int, *args: Any) -> tuple[list[fs.StepResult], list[Window]]:
    """The steps, which are the same on all ranks, and the windows of all ranks."""
    (results, _), *others = told = run_distributed(_run, ranks, *args)
    assert all(repr(other) == repr(results) for other, _ in others)  # a nan in them equals no other
    return results, [list(window) for window in zip(*(windows for _, windows in told), strict=True)]


def _train_original(
    port: Port, folder: Path, windows: list[Window]
) -> tuple[nn.Module, list[tuple[float, float]]]:
    """The model after these windows, and the loss and the norm of the gradient of each."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = port.schedule(optimizer)
    steps = []
    for window in windows:
        shares: list[float] = []

        def losses(window: Window = window, shares: list[float] = shares) -> Iterator[torch.Tensor]:
            for loss, share in port.original(model, window):
                shares.append(share)
                yield loss

        _, norm = plain.step(model, losses(), [optimizer], max_norm=1.0)
        steps.append((sum(shares), norm))
        scheduler.step()
    return model, steps


@pytest.mark.parametrize("port", [PRIME_RL, VERL], ids=["prime-rl", "verl"])
def test_a_port_trains_resumes_on_fewer_ranks_and_exports_as_the_original(
    port: Port, folder: Path, tmp_path: Path
) -> None:
    out, resumed_out = tmp_path / "out", tmp_path / "resumed"
    results, windows = _on_ranks(2, port, folder, out)
    assert len(results) == STEPS
    model, expected = _train_original(port, folder, windows)
    _check_steps(results, expected)
    _check_rows(folder, windows)
    _check_export(out, model)
    logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    evaluated = [line[port.evaluation] for line in logged if port.evaluation in line][-1]
    rows = list(dict.fromkeys(row for window in windows for row in all_rows(window)))
    with torch.no_grad():
        ((_, loss),) = port.original(model.eval(), [[rows]])  # of all rows in one batch
    assert evaluated == pytest.approx(loss, rel=1e-6)

    shutil.copytree(out, resumed_out, ignore=shutil.ignore_patterns("export", "huggingface", "log.jsonl"))
    rest, rest_windows = _on_ranks(1, port, folder, resumed_out, "--resume")
    model, expected = _train_original(port, folder, [*windows[:SAVED], *rest_windows])
    _check_steps(rest, expected[SAVED:])
    _check_export(resumed_out, model)
    if port is not PRIME_RL:  # the packs of an epoch are dealt anew to another number of ranks
        mine, theirs = ([sorted(all_rows(one)) for one in those] for those in (rest_windows, windows[SAVED:]))
        assert mine == theirs


def _check_steps(results: list[Any], expected: list[tuple[float, float]]) -> None:
    """Losses are the same within 1e-6, norms of the gradient within 3e-6."""
    losses, norms = zip(*expected, strict=True)
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-6)
    assert [result.grad_norm for result in results] == pytest.approx(norms, rel=3e-6)


def _check_rows(folder: Path, windows: list[Window]) -> None:
    """An epoch has every row once, and what is trained of it is the answer and the end of the turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]
    epoch = [row for window in windows for row in all_rows(window)][: len(chats)]
    trained = [tokenizer.decode([row.ids[i] for i in row.scored]) for row in epoch]
    assert sorted(trained) == sorted(f"{answer['content']}<|im_end|>" for _, answer in chats)


def _check_export(out: Path, model: nn.Module) -> None:
    """An export, read back, is the oracle's model in bfloat16 but for what the last bits of float32 do."""
    exported = AutoModelForCausalLM.from_pretrained(
        next(out.glob("*/config.json")).parent, dtype=torch.float32
    )
    for (name, ours), theirs in zip(exported.named_parameters(), model.parameters(), strict=True):
        assert ours.shape == theirs.shape, name
        assert torch.dist(ours, theirs) < 3e-3 * theirs.norm(), name


# --- run_clm_no_trainer: on one rank losses in float32 are bitwise the original's ---

PORTS = EXAMPLES / "ports"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A tiny model, chats, and texts that make 16 blocks of 16 tokens to train on and 5 to evaluate."""
    texts = [text for turn in TURNS[:8] for text in turn]
    script("tiny_model", EXAMPLES).make_tiny_model(tmp_path / "model", texts)
    port, tokenizer = script("run_clm_no_trainer", PORTS), AutoTokenizer.from_pretrained(tmp_path / "model")
    for name, number in (("train", 16), ("validation", 5)):
        lines = texts * 8
        while len(port.group_texts(lines, tokenizer, 16)) > number:
            lines.pop()
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    return tmp_path


WORDS = (
    "--block-size 16 --per-device-train-batch-size 2 --num-train-epochs 2 --weight-decay 0.1 "
    "--num-warmup-steps 1 --mixed-precision no --gradient-accumulation-steps 2 --weigh batches"
)


def _original(folder: Path, rows: list[Any]) -> tuple[Any, list[tuple[float, float]]]:
    """The model that the original's loop trains, and loss and norm of each of its steps."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()
    # The tokenizer has a token more than the model (Qwen2's end of text): its embedding grows, as there.
    known = model.config.vocab_size
    model.resize_token_embeddings(known + 1, mean_resizing=False)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[known:] = embedding[:known].double().mean(0)
    named = list(model.named_parameters())
    plainly = [p for n, p in named if "norm" in n or "bias" in n]
    decayed = [p for n, p in named if not ("norm" in n or "bias" in n)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plainly, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)
    scheduler = get_scheduler("linear", optimizer, 1, 8)
    sampler, steps = fs.ResumableSampler(rows), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(DataLoader(rows, 2, sampler=sampler, collate_fn=default_data_collator))
        for window in zip(batches[::2], batches[1::2], strict=True):
            losses = (model(**batch).loss / 2 for batch in window)  # a mean of means
            steps.append(plain.step(model, losses, [optimizer], max_norm=float("inf")))
            scheduler.step()
    return model.eval(), steps


@on_ranks(1)
def test_run_clm_trains_as_the_original(written: Path, tmp_path: Path) -> None:
    port, out = script("run_clm_no_trainer", PORTS), tmp_path / "out"
    files = ["--train-file", str(written / "train.txt"), "--validation-file", str(written / "validation.txt")]
    args = port.parse_arguments(
        ["--model", str(written / "model"), *files, "--output-dir", str(out), *WORDS.split()]
    )
    results = port.train(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows, held_out = (
        port.group_texts(path.read_text().splitlines(), tokenizer, 16)
        for path in (args.train_file, args.validation_file)
    )
    model, expected = _original(written, rows)
    assert (len(expected), [(result.loss, result.grad_norm) for result in results]) == (8, expected)
    # So is the original's evaluation, a mean over rows.
    with torch.no_grad():
        means = [float(model(**default_data_collator([row])).loss) for row in held_out]
    logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    evaluated = [line["eval_loss"] for line in logged if "eval_loss" in line][-1]
    assert evaluated == pytest.approx(sum(means) / len(means), rel=1e-5)
    assert (out / "export" / "model.safetensors").exists()

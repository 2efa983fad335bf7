"""The ports of prime-rl, verl, open-instruct and OpenRLHF against the originals' loops, in torch alone.

Only which rows a step has is taken from the port. The oracle gets them without packing, padding or nesting,
each row in a forward of its own, and scales, clips and schedules as the original does.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup, get_scheduler

import fsdp_sft as fs
from tests.harness.places import EXAMPLES, script
from tests.harness.ranks import run_distributed

PORTS = EXAMPLES / "ports"
NUM_ROWS, STEPS, SAVED = 40, 10, 6  # the checkpoint is in the middle of the second of two epochs


class Row(NamedTuple):
    """Tokens of a row, and the places of those that are trained."""

    ids: tuple[int, ...]
    scored: tuple[int, ...]


Batch = list[Row]  # of pairs: first all chosen answers, then all rejected ones
Window = list[list[Batch]]  # a step's batches, of each rank


# Rows of the ports' batches


def _of_pack(batch: Any) -> Batch:
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


def _of_nested(batch: Any) -> Batch:
    pairs = zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True)
    return [Row(tuple(ids.tolist()), tuple(mask.nonzero()[:, 0].tolist())) for ids, mask in pairs]


def _of_padded(batch: Any) -> Batch:
    columns = (batch["input_ids"], batch["attention_mask"], batch["labels"] != -100)
    return _unpadded(*columns)


def _of_tuple(batch: Any) -> Batch:
    return _unpadded(*batch)


def _unpadded(ids: torch.Tensor, attention: torch.Tensor, mask: torch.Tensor) -> Batch:
    return [
        Row(tuple(row[seen != 0].tolist()), tuple(scored.nonzero()[:, 0].tolist()))
        for row, seen, scored in zip(ids, attention, mask, strict=True)
    ]


# The originals' losses: each yields what a micro-batch's backward is called on and what it adds to the log

Scaled = Iterator[tuple[torch.Tensor, float]]


def _log_probs(model: nn.Module, row: Row) -> torch.Tensor:
    """Of each token but the first."""
    ids = torch.tensor(row.ids)
    return model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def _scored(model: nn.Module, row: Row) -> torch.Tensor:
    return _log_probs(model, row)[torch.tensor(row.scored) - 1]


def _prime_rl(model: nn.Module, window: Window, _: Any) -> Scaled:
    """Sums over the number of micro-batches, averaged over ranks; then all gradients by one factor."""
    count, micro_batches = sum(len(row.scored) for row in _rows(window)), len(window[0])
    for batch in _batches(window):
        total = torch.stack([-_scored(model, row).sum() for row in batch]).sum()
        yield total / micro_batches / len(window), float(total.detach()) / count
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(len(window) * micro_batches / count)


def _verl(model: nn.Module, window: Window, _: Any) -> Scaled:
    """The tokens of a batch one after the other; ids and mask are rolled over the borders of its rows."""
    tokens = sum(len(row.scored) for row in _rows(window))
    for batch in _batches(window):
        logits = torch.cat([model(torch.tensor([row.ids])).logits[0] for row in batch])
        ids = torch.tensor([i for row in batch for i in row.ids])
        mask = torch.tensor([float(i in row.scored) for row in batch for i in range(len(row.ids))])
        log_probs = logits.log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[:, 0]
        loss = -(log_probs * mask.roll(-1)).sum() / tokens * len(window)
        yield loss / len(window), float(loss.detach()) / len(window)


def _open_instruct(model: nn.Module, window: Window, reduce_loss: str) -> Scaled:
    """transformers' mean of each batch, or its sum, over micro-batches and ranks."""
    for batch in _batches(window):
        losses = torch.cat([-_scored(model, row) for row in batch])
        loss = losses.mean() if reduce_loss == "mean" else losses.sum()
        yield loss / len(window[0]) / len(window), float(loss.detach()) / len(window[0]) / len(window)


def _openrlhf_sft(model: nn.Module, window: Window, _: Any) -> Scaled:
    """The tokens of the step over the micro-batches, by which DeepSpeed divides once more."""
    steps, ranks = len(window[0]), len(window)
    tokens = sum(len(row.scored) for row in _rows(window)) / steps
    for batch in _batches(window):
        loss = -torch.cat([_scored(model, row) for row in batch]).sum() / tokens * ranks
        yield loss / steps / ranks, float(loss.detach()) / steps / ranks


def _openrlhf_dpo(model: nn.Module, window: Window, reference: nn.Module) -> Scaled:
    """With label smoothing and the mean log-probability of the chosen answers beside it."""
    for batch in _batches(window):
        policy = torch.stack([_scored(model, row).sum() for row in batch])
        with torch.no_grad():
            known = torch.stack([_scored(reference, row).sum() for row in batch])
        mean = policy / torch.tensor([len(row.scored) for row in batch])
        (chosen, rejected), (old, old_rejected) = policy.chunk(2), known.chunk(2)
        logits = 0.5 * (chosen - rejected - (old - old_rejected))
        losses = -F.logsigmoid(logits) * 0.9 - F.logsigmoid(-logits) * 0.1
        loss = (losses.mean() - 0.2 * mean.chunk(2)[0].mean()) / len(window[0]) / len(window)
        yield loss, float(loss.detach())


def _batches(window: Window) -> list[Batch]:
    return [batch for rank in window for batch in rank]


def _rows(window: Window) -> list[Row]:
    return [row for batch in _batches(window) for row in batch]


# The originals' schedules


def _warmup(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-8, total_iters=3)


def _cosine(optimizer: Any) -> Any:
    return get_cosine_schedule_with_warmup(optimizer, 2, STEPS)


def _linear(optimizer: Any) -> Any:
    """It is stepped once per rank, for the batches of all ranks, so it ends where this one does."""
    return get_scheduler("linear", optimizer, 2, STEPS)


def _cosine_to_a_tenth(optimizer: Any) -> Any:
    options = {"scheduler_specific_kwargs": {"min_lr_rate": 0.1}}
    return get_scheduler("cosine_with_min_lr", optimizer, 1, STEPS, **options)


# The ports


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


_OPEN_INSTRUCT = (
    "--per-device-train-batch-size 2 --num-train-epochs 2 --learning-rate 1e-3 --warmup-ratio 0.2"
)
_OPENRLHF = "--batch-size 8 --micro-batch-size 2 --max-epochs 2 --lr 1e-3 --lr-warmup-ratio 0.1"
_VERL = "--train-batch-size 8 --micro-batch-size-per-gpu 2 --total-epochs 2 --lr 1e-3"

PRIME_RL = Port(
    "prime_rl_sft",
    f"--seq-len 64 --batch-size 4 --max-steps {STEPS} --lr 1e-3 --warmup-steps 3 --ckpt-interval {SAVED}",
    _of_pack,
    _prime_rl,
    _warmup,
    {"weight_decay": 0.01},
)
VERL = Port(
    "verl_sft",
    f"{_VERL} --lr-warmup-steps-ratio 0.2 --save-freq {SAVED}",
    _of_nested,
    _verl,
    _cosine,
    {"weight_decay": 0.01},
)
MEAN, SUM = (
    Port(
        "open_instruct_finetune",
        f"{_OPEN_INSTRUCT} --warmup-ratio 0.2 --clip-grad-norm {clip} --reduce-loss {reduce_loss} --checkpointing-steps {SAVED}",
        _of_padded,
        _open_instruct,
        _linear,
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
    _of_tuple,
    _openrlhf_sft,
    _cosine_to_a_tenth,
    {"betas": (0.9, 0.95), "weight_decay": 0.0},
)
DPO = Port(
    "openrlhf_sft_dpo",
    f"dpo {_OPENRLHF} --save-steps {SAVED} --beta 0.5 --label-smoothing 0.1 --nll-loss-coef 0.2",
    _of_tuple,
    _openrlhf_dpo,
    _cosine_to_a_tenth,
    {"betas": (0.9, 0.95), "weight_decay": 0.0},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and the same questions as chats, answers and pairs."""
    folder = tmp_path_factory.mktemp("ports")
    rows = [(f"What is {i} and {i}?", f"It is {2 * i}" + " indeed" * (i % 5)) for i in range(NUM_ROWS)]
    script("tiny_model", EXAMPLES).make_tiny_model(folder / "model", [text for row in rows for text in row])
    chats = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
        for ask, answer in rows
    ]
    answers = [{"prompt": ask, "response": answer} for ask, answer in rows]
    pairs = [{"prompt": ask, "chosen": answer, "rejected": "No idea"} for ask, answer in rows]
    for name, lines in {"chats": chats, "answers": answers, "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def _data_of(port: Port) -> str:
    if port.name != "openrlhf_sft_dpo":
        return "chats.jsonl"
    return "answers.jsonl" if port is SFT else "pairs.jsonl"


def _run(port: Port, folder: Path, data: str, out: Path, *more: str) -> tuple[list[fs.StepResult], list[Any]]:
    """What the port's steps did, and the rows of this rank's window of each."""
    module, windows = script(port.name, PORTS), []
    words = [*port.words.split(), "--dtype", "float32", "--output", str(out), *more]
    if port.accumulates:
        words += ["--gradient-accumulation-steps", str(4 // dist.get_world_size())]
    train_step = fs.train_step

    def recording(model: nn.Module, window: list[Any], *args: Any, **options: Any) -> Any:
        windows.append([port.rows_of(batch) for batch in window])
        return train_step(model, window, *args, **options)

    with mock.patch.object(fs, "train_step", recording):
        args = module.parse_arguments(
            [*words, "--model", str(folder / "model"), "--data", str(folder / data)]
        )
        return module.train(args), windows


def _plain(port: Port, folder: Path) -> nn.Module:
    """The model; open-instruct gives it rows for tokens that only the tokenizer has, the others' mean."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    known, tokens = model.config.vocab_size, len(AutoTokenizer.from_pretrained(folder / "model"))
    if port.name == "open_instruct_finetune":
        model.resize_token_embeddings(tokens, mean_resizing=False)
        with torch.no_grad():
            embedding = model.get_input_embeddings().weight
            embedding[known:] = embedding[:known].double().mean(0)
    return model


def _original(port: Port, folder: Path, windows: list[Window]) -> tuple[nn.Module, list[tuple[float, float]]]:
    model, reference = _plain(port, folder), _plain(port, folder)
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


def _check(results: list[Any], expected: list[tuple[float, float]]) -> None:
    assert len(results) == len(expected)
    for index, (name, tolerance) in enumerate((("loss", 1e-6), ("grad_norm", 1e-6))):
        actual, wanted = [getattr(result, name) for result in results], [step[index] for step in expected]
        assert actual == pytest.approx(wanted, rel=tolerance), f"{name}: {actual} for {wanted}"


def _across(ranks: list[tuple[list[fs.StepResult], list[Any]]]) -> tuple[list[fs.StepResult], list[Window]]:
    """The steps, which are the same on all ranks, and the windows of all ranks."""
    (results, _), *others = ranks
    assert all(other == results for other, _ in others)
    return results, [list(window) for window in zip(*(windows for _, windows in ranks), strict=True)]


@pytest.mark.parametrize(
    "port",
    [PRIME_RL, VERL, MEAN, SUM, SFT, DPO],
    ids=["prime-rl", "verl", "open-instruct-mean", "open-instruct-sum", "openrlhf-sft", "openrlhf-dpo"],
)
def test_a_port_trains_resumes_on_fewer_ranks_and_exports_as_the_original(
    port: Port, folder: Path, tmp_path: Path
) -> None:
    out, resumed_out = tmp_path / "out", tmp_path / "resumed"
    data = _data_of(port)
    results, windows = _across(run_distributed(_run, 2, port, folder, data, out))
    assert len(results) == STEPS
    model, expected = _original(port, folder, windows)
    _check(results, expected)
    _check_rows(port, folder, windows)
    _check_export(next(out.glob("*/config.json")).parent, model)

    shutil.copytree(out, resumed_out, ignore=shutil.ignore_patterns("export", "huggingface", "log.jsonl"))
    again = run_distributed(_run, 1, port, folder, data, resumed_out, "--resume")
    rest, rest_windows = _across(again)
    model, expected = _original(port, folder, [*windows[:SAVED], *rest_windows])
    _check(rest, expected[SAVED:])
    _check_export(next(resumed_out.glob("*/config.json")).parent, model)
    if port is not PRIME_RL:  # the packs of an epoch are dealt anew to another number of ranks
        mine, theirs = ([sorted(_rows(one)) for one in those] for those in (rest_windows, windows[SAVED:]))
        assert mine == theirs


def _check_rows(port: Port, folder: Path, windows: list[Window]) -> None:
    """An epoch has every row once, and what is trained of it is the answer and the end of the turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [row for window in windows for row in _rows(window)]
    epoch = rows[: NUM_ROWS * (2 if port is DPO else 1)]
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    answers = [line["response"] for line in lines] + ["No idea"] * (NUM_ROWS if port is DPO else 0)
    trained = [tokenizer.decode([row.ids[i] for i in row.scored]) for row in epoch]
    assert sorted(trained) == sorted(f"{answer}<|im_end|>" for answer in answers)


def _check_export(path: Path, model: nn.Module) -> None:
    """An export, read back, is the oracle's model in bfloat16 but for what the last bits of float32 do."""
    exported = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for (name, ours), theirs in zip(exported.named_parameters(), model.parameters(), strict=True):
        assert ours.shape == theirs.shape, name
        assert torch.dist(ours, theirs) < 3e-3 * theirs.norm(), name

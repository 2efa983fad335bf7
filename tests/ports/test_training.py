"""Each port beside the original's loop: ten steps on two ranks, resumed on one, evaluated, exported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.harness.ranks import run_distributed
from tests.ports.cases import (
    DPO,
    MEAN,
    PRIME_RL,
    SFT,
    SUM,
    VERL,
    Port,
    across,
    check_steps,
    data_of,
    plain,
    run,
    train_original,
)
from tests.ports.originals import NUM_ROWS, SAVED, STEPS, Batch, Window, all_rows, batches_of


@pytest.mark.parametrize(
    "port",
    [PRIME_RL, VERL, MEAN, SUM, SFT, DPO],
    ids=["prime-rl", "verl", "open-instruct-mean", "open-instruct-sum", "openrlhf-sft", "openrlhf-dpo"],
)
def test_a_port_trains_resumes_on_fewer_ranks_and_exports_as_the_original(
    port: Port, folder: Path, tmp_path: Path
) -> None:
    out, resumed_out = tmp_path / "out", tmp_path / "resumed"
    data = data_of(port)
    results, windows = across(run_distributed(run, 2, port, folder, data, out))
    assert len(results) == STEPS
    model, expected = train_original(port, folder, windows)
    check_steps(results, expected)
    _check_rows(port, folder, windows)
    _check_export(next(out.glob("*/config.json")).parent, model)
    if port.evaluates is not None:
        logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        (*_, evaluated) = (line[port.evaluates[1]] for line in logged if port.evaluates[1] in line)
        assert evaluated == pytest.approx(_evaluation(port, folder, model, windows), rel=1e-6)

    shutil.copytree(out, resumed_out, ignore=shutil.ignore_patterns("export", "huggingface", "log.jsonl"))
    again = run_distributed(run, 1, port, folder, data, resumed_out, "--resume")
    rest, rest_windows = across(again)
    model, expected = train_original(port, folder, [*windows[:SAVED], *rest_windows])
    check_steps(rest, expected[SAVED:])
    _check_export(next(resumed_out.glob("*/config.json")).parent, model)
    if port is not PRIME_RL:  # the packs of an epoch are dealt anew to another number of ranks
        mine, theirs = ([sorted(all_rows(one)) for one in those] for those in (rest_windows, windows[SAVED:]))
        assert mine == theirs


def _check_rows(port: Port, folder: Path, windows: list[Window]) -> None:
    """An epoch has every row once, and what is trained of it is the answer and the end of the turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [row for window in windows for row in all_rows(window)]
    epoch = rows[: NUM_ROWS * (2 if port is DPO else 1)]
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    answers = [line["response"] for line in lines] + ["No idea"] * (NUM_ROWS if port is DPO else 0)
    trained = [tokenizer.decode([row.ids[i] for i in row.scored]) for row in epoch]
    assert sorted(trained) == sorted(f"{answer}<|im_end|>" for answer in answers)


def _evaluation(port: Port, folder: Path, model: nn.Module, windows: list[Window]) -> float:
    """The original's loss of all rows in one batch: the mean over tokens, or over pairs."""
    batches = [batch for window in windows for batch in batches_of(window)]
    halves = 2 if port is DPO else 1
    rows = [row for half in range(halves) for batch in batches for row in _half(batch, half, halves)]
    once = list(dict.fromkeys(rows)) if halves == 1 else rows
    with torch.no_grad():
        ((_, loss),) = port.original(model.eval(), [[once]], plain(port, folder))
    return loss


def _half(batch: Batch, half: int, halves: int) -> Batch:
    size = len(batch) // halves
    return batch[half * size : (half + 1) * size]


def _check_export(path: Path, model: nn.Module) -> None:
    """An export, read back, is the oracle's model in bfloat16 but for what the last bits of float32 do."""
    exported = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for (name, ours), theirs in zip(exported.named_parameters(), model.parameters(), strict=True):
        assert ours.shape == theirs.shape, name
        assert torch.dist(ours, theirs) < 3e-3 * theirs.norm(), name

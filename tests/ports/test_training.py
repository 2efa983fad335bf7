"""Each port beside the original's loop: ten steps on two ranks, resumed on one, evaluated, exported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.harness.ranks import run_distributed
from tests.ports.cases import PRIME_RL, VERL, Port, across, check_steps, run, train_original
from tests.ports.originals import SAVED, STEPS, Window, all_rows


@pytest.mark.parametrize(
    "port",
    [PRIME_RL, VERL],
    ids=["prime-rl", "verl"],
)
def test_a_port_trains_resumes_on_fewer_ranks_and_exports_as_the_original(
    port: Port, folder: Path, tmp_path: Path
) -> None:
    out, resumed_out = tmp_path / "out", tmp_path / "resumed"
    results, windows = across(run_distributed(run, 2, port, folder, "chats.jsonl", out))
    assert len(results) == STEPS
    model, expected = train_original(port, folder, windows)
    check_steps(results, expected)
    _check_rows(folder, windows)
    _check_export(next(out.glob("*/config.json")).parent, model)
    logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    (*_, evaluated) = (line[port.evaluates[1]] for line in logged if port.evaluates[1] in line)
    assert evaluated == pytest.approx(_evaluation(port, model, windows), rel=1e-6)

    shutil.copytree(out, resumed_out, ignore=shutil.ignore_patterns("export", "huggingface", "log.jsonl"))
    again = run_distributed(run, 1, port, folder, "chats.jsonl", resumed_out, "--resume")
    rest, rest_windows = across(again)
    model, expected = train_original(port, folder, [*windows[:SAVED], *rest_windows])
    check_steps(rest, expected[SAVED:])
    _check_export(next(resumed_out.glob("*/config.json")).parent, model)
    if port is not PRIME_RL:  # the packs of an epoch are dealt anew to another number of ranks
        mine, theirs = ([sorted(all_rows(one)) for one in those] for those in (rest_windows, windows[SAVED:]))
        assert mine == theirs


def _check_rows(folder: Path, windows: list[Window]) -> None:
    """An epoch has every row once, and what is trained of it is the answer and the end of the turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]
    epoch = [row for window in windows for row in all_rows(window)][: len(chats)]
    trained = [tokenizer.decode([row.ids[i] for i in row.scored]) for row in epoch]
    assert sorted(trained) == sorted(f"{answer['content']}<|im_end|>" for _, answer in chats)


def _evaluation(port: Port, model: nn.Module, windows: list[Window]) -> float:
    """The original's loss of all rows in one batch: the mean over tokens."""
    rows = list(dict.fromkeys(row for window in windows for row in all_rows(window)))
    with torch.no_grad():
        ((_, loss),) = port.original(model.eval(), [[rows]])
    return loss


def _check_export(path: Path, model: nn.Module) -> None:
    """An export, read back, is the oracle's model in bfloat16 but for what the last bits of float32 do."""
    exported = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for (name, ours), theirs in zip(exported.named_parameters(), model.parameters(), strict=True):
        assert ours.shape == theirs.shape, name
        assert torch.dist(ours, theirs) < 3e-3 * theirs.norm(), name

"""Runs of the tape: the same bits again, and one bit that differs is named."""

import copy
import json
import math
from argparse import Namespace
from pathlib import Path

import pytest

from baseline import tape
from baseline.__main__ import _differences

RUNS = [
    tape.Played("Qwen3MoeForCausalLM", lora="experts", again=1),
    tape.Played("LlamaForCausalLM", packed=True, compute="bfloat16", sac="1"),
]


def test_names_of_runs_say_what_they_are() -> None:
    names = [run.name for run in tape.runs()]
    assert len(set(names)) == len(names) >= 120
    assert RUNS[0].name == "Qwen3MoeForCausalLM lora=experts again=1"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_gives_the_same_bits_again_and_a_planted_one_is_seen(run: tape.Played, tmp_path: Path) -> None:
    first, second = ({run.name: tape.play(run, tmp_path / name)} for name in ("first", "second"))
    assert _differences(first, second) == []
    assert "error" not in first[run.name]
    planted = copy.deepcopy(second)
    steps = planted[run.name]["steps"]
    steps[1][0] = math.nextafter(float.fromhex(steps[1][0]), math.inf).hex()
    (line,) = _differences(first, planted)
    assert line.startswith(f"  {run.name}\n")
    assert steps[1][0] in line
    assert _differences(first, {}) == [f"  gone: {run.name}"]


def test_what_is_logged_for_this_tree_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape, "CACHE", tmp_path)
    arguments = Namespace(log=None, only="labels chatml")
    found = tape.now(arguments, None)
    assert "labels chatml" in found
    log = tmp_path / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps({**line, "found": "from the log"}) + "\n" for line in lines))
    assert tape.now(arguments, None)["labels chatml"] == "from the log"
    monkeypatch.setattr(tape, "_tree", lambda: "another")
    assert tape.now(arguments, None)["labels chatml"] == found["labels chatml"]


def test_a_run_that_fails_is_recorded_as_its_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="NothingForCausalLM") as caught:
        tape.play(tape.Played("NothingForCausalLM"), tmp_path / "run")
    assert "NothingForCausalLM" in tape._said(caught.value)

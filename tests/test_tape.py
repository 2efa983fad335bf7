"""Runs of the tape: the same bits again, and one bit that differs is named."""

import copy
import math
from pathlib import Path

import pytest

from baseline import tape
from baseline.__main__ import _differences

RUNS = [
    tape.Played("Qwen3MoeForCausalLM", lora="experts", again=1),
    tape.Played("LlamaForCausalLM", packed=True, compute="bfloat16", sac="1"),
]


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

"""A few compositions in the suite; ``make compositions`` tries hundreds."""

import itertools
import json
import runpy

import pytest
from hypothesis import given, settings

import fsdp_sft
from tests.compositions import fixed, plain, reasons
from tests.compositions.axes import AXES, DIFFERENCES, PLAINEST, full, settled
from tests.compositions.drawing import compositions
from tests.compositions.judge import Outcome, judge


@pytest.mark.parametrize("number", range(len(fixed.EQUAL)))
def test_a_composition_is_equal(number: int) -> None:
    draw = full(fixed.EQUAL[number])
    assert (draw, judge(draw, seed=number)) == (settled(draw), Outcome("equal"))


@pytest.mark.parametrize("reason", fixed.REFUSED)
def test_a_composition_is_refused(reason: str) -> None:
    assert judge(settled(full(fixed.REFUSED[reason]))) == Outcome("refused", reason)


@pytest.mark.parametrize("difference", DIFFERENCES[1:])
def test_a_rank_that_differs_is_an_error_on_every_rank(difference: str) -> None:
    draw = full({"mesh": "fsdp 2", "odd rank": difference, "accumulation": "3 last", "sac": "1/3"})
    assert judge(draw, seed=len(difference)) == Outcome("refused", "a rank that differs")


def test_what_comes_out_otherwise_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = plain._weight
    monkeypatch.setattr(plain, "_weight", lambda draw, batch: weight(draw, batch) + 1)
    outcome = judge(full({"mesh": "fsdp 2"}))
    assert outcome.kind == "fault"
    assert outcome.reason.startswith("losses[0] is off by ")


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(compositions())
def test_draws_are_settled(draw: dict[str, str]) -> None:
    assert settled(draw) == draw


def test_reasons_are_typed_errors_each_of_which_a_draw_can_meet() -> None:
    names = [reason.name for reason in reasons.REASONS]
    assert len(set(names)) == len(names)
    for reason in reasons.REASONS:
        assert issubclass(getattr(fsdp_sft, reason.error), fsdp_sft.FsdpSftError)
        assert set(reason.axes) <= set(AXES)
        assert not reason.applies(PLAINEST)
        options = itertools.product(*(AXES[axis] for axis in reason.axes))
        drawn = ({"mesh": "fsdp 2", **dict(zip(reason.axes, chosen, strict=True))} for chosen in options)
        assert any(reason.applies(settled(full(options))) for options in drawn), reason.name


def test_the_page_of_refusals_is_made_of_the_list() -> None:
    assert reasons.PAGE.read_text() == reasons.page(), "run python -m tests.compositions.reasons"


def test_one_draw_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr("sys.argv", ["compositions", "--draw", json.dumps({"sac": "1"})])
        runpy.run_module("tests.compositions", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith('{"sac": "1"}: equal')

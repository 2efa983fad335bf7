"""A few compositions in the suite; ``make compositions`` tries hundreds."""

import itertools
import json
import random
import runpy
from pathlib import Path
from typing import Any

import pytest

import fsdp_sft
from tests.compositions import fixed, page, reasons
from tests.compositions.axes import AXES, PLAINEST, Draw, differences, full, pairs, settled
from tests.compositions.drawing import COSTLY, allowed_pairs, draws
from tests.compositions.judge import Outcome, judge
from tests.compositions.log import Entry, Log, table
from tests.compositions.shrinking import shrink
from tests.harness.native import needs_native_sharding


@pytest.mark.parametrize("number", range(len(fixed.EQUAL)))
def test_a_composition_is_equal(number: int) -> None:
    draw = full(fixed.EQUAL[number])
    if draw["expert ranks"] != "1":
        needs_native_sharding()
    assert draw == settled(draw)
    assert judge(draw, seed=number) == Outcome("equal")


@pytest.mark.parametrize("reason", fixed.REFUSED)
def test_a_composition_is_refused(reason: str) -> None:
    assert judge(settled(full(fixed.REFUSED[reason]))) == Outcome("refused", reason)


def test_draws_are_settled_and_go_towards_rare_pairs() -> None:
    drawn = list(itertools.islice(draws(3), 150))
    assert drawn[:10] == list(itertools.islice(draws(3), 10)), "a seed names its draws"
    assert all(settled(draw) == draw for draw in drawn)
    generator = random.Random(3)
    at_random = [settled({a: generator.choice(o) for a, o in AXES.items()}) for _ in range(150)]
    wanted = {pair for pair in allowed_pairs() if not COSTLY.keys() & set(pair)}
    seen, chance = (len(wanted & {p for d in some for p in pairs(d)}) for some in (drawn, at_random))
    assert seen > chance
    for (axis, option), share in COSTLY.items():
        assert sum(draw[axis] == option for draw in drawn) <= 3 * share * len(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_of_500_draws_every_allowed_pair_runs_in_one(seed: int) -> None:
    running = [draw for draw in itertools.islice(draws(seed), 500) if not reasons.applying(draw)]
    assert allowed_pairs() <= {pair for draw in running for pair in pairs(draw)}


def test_a_fault_is_shrunk_to_what_it_needs() -> None:
    def faulty(draw: Draw) -> Outcome:
        found = draw["mesh"] == "fsdp 3" and draw["sac"] == "1"
        return Outcome("fault", "off") if found else Outcome("equal")

    start = settled(
        full({"mesh": "fsdp 3", "sac": "1", "clip": "1e-2", "loss": "logits", "export": "float32"})
    )
    smallest, outcome = shrink(start, faulty)
    assert differences(smallest) == {"mesh": "fsdp 3", "sac": "1"}
    assert outcome.kind == "fault"


def test_a_log_is_gone_on_from_and_refused_for_another_seed(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl", seed=1)
    entry = Entry(0, full({"mesh": "fsdp 2"}), Outcome("equal"), 1.5)
    log.add(entry)
    assert Log(tmp_path / "log.jsonl", seed=1).entries == [entry]
    with pytest.raises(SystemExit, match="another seed"):
        Log(tmp_path / "log.jsonl", seed=2)
    assert "1 draws: 1 equal, 0 refused, 0 faults" in table(log.entries)


def test_reasons_are_typed_errors_each_of_which_a_draw_can_meet() -> None:
    names = [reason.name for reason in reasons.REASONS]
    assert len(set(names)) == len(names)
    for reason in reasons.REASONS:
        error: Any = getattr(fsdp_sft, reason.error)
        assert issubclass(error, fsdp_sft.FsdpSftError)
        assert set(reason.axes) <= set(AXES)
        assert not reason.applies(PLAINEST)
        options = itertools.product(*(AXES[axis] for axis in reason.axes))
        drawn = ({"mesh": "fsdp 2", **dict(zip(reason.axes, chosen, strict=True))} for chosen in options)
        assert any(reason.applies(settled(full(options))) for options in drawn), reason.name


def test_pairs_that_are_refused_are_not_allowed() -> None:
    allowed = allowed_pairs()
    assert (("batches", "packed with a mask"), ("mesh", "1")) not in allowed
    assert (("loss", "chunked"), ("mesh", "hsdp 2x2")) in allowed


def test_the_page_of_refusals_is_made_of_the_list() -> None:
    assert page.PAGE.read_text() == page.text(), "run python -m tests.compositions.page"


def test_one_draw_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr("sys.argv", ["compositions", "--draw", json.dumps({"sac": "1"})])
        runpy.run_module("tests.compositions", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith('{"sac": "1"}: equal')

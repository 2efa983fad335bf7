"""A few programs in the suite; ``make programs`` tries hundreds."""

from collections import Counter

import pytest

from tests.programs.judge import judge
from tests.programs.plain import Plain
from tests.programs.writing import DIFFERENCES, LOSSES, SETTINGS, TOGGLES, WAYS_TO_FAIL, drawn


@pytest.mark.parametrize("seed", range(1001, 1006))
def test_a_program_gives_what_the_plain_loop_gives_or_is_refused(seed: int) -> None:
    outcome = judge(drawn(seed))
    assert outcome.kind == "right", outcome.reason


def test_a_seed_names_its_program_and_everything_is_drawn() -> None:
    programs = [drawn(seed) for seed in range(300)]
    assert programs == [drawn(seed) for seed in range(300)]
    for axis, options in SETTINGS.items():
        assert {program.settings[axis] for program in programs} == set(options)
    arguments = Counter(argument for program in programs for step in program.steps for argument in step)
    assert {*TOGGLES, *LOSSES, *WAYS_TO_FAIL} <= arguments.keys()
    assert {program.odd[1] for program in programs if program.odd} == set(DIFFERENCES)
    assert all(program.steps[-1] == ("train", "own") for program in programs if not program.odd)


def test_what_comes_out_otherwise_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    program = drawn(0)
    short = type(program)(program.seed, {**program.settings, "model": "llama"}, (("evaluate", "own"),))
    assert judge(short).kind == "right"
    monkeypatch.setattr(Plain, "_evaluate", lambda plain, loss: (1.0, 3))
    outcome = judge(short)
    assert outcome.kind == "fault"
    assert "step 0, ('evaluate', 'own')" in outcome.reason

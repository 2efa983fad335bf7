"""A few programs in the suite; ``make programs`` tries hundreds."""

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.programs.judge import judge
from tests.programs.plain import Plain
from tests.programs.writing import SETTINGS, Program, programs

A_FEW = settings(
    max_examples=4,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("odd", [False, True])
def test_a_program_gives_what_the_plain_loop_gives_or_is_refused(odd: bool) -> None:
    @seed(1)
    @A_FEW
    @given(programs(odd=odd))
    def trial(program: Program) -> None:
        outcome = judge(program)
        assert outcome.kind == "equal", outcome.reason

    trial()


def test_what_comes_out_otherwise_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    plainest = {axis: options[0] for axis, options in SETTINGS.items()}
    short = Program(0, plainest, (("evaluate", "own"),))
    assert judge(short).kind == "equal"
    monkeypatch.setattr(Plain, "_evaluate", lambda plain, loss: (1.0, 3))
    outcome = judge(short)
    assert outcome.kind == "fault"
    assert "step 0, ('evaluate', 'own')" in outcome.reason

"""What the suite may start, and which tests it leaves to `make test-slow`."""

import re
from collections import Counter

import pytest

from tests import slow
from tests.harness import budget
from tests.harness.places import ROOT

ALLOWED = {
    "step": {"tasks": 3, "started": 2},
    "default": {"tasks": 1, "started": 0},
    "all": {"tasks": 4, "started": 2},
}


@pytest.mark.parametrize(
    ("used", "named"),
    [
        ({"tasks": 3, "started": 2}, []),
        ({"tasks": 4}, ["step has 4 tasks and a budget of 3"]),
        ({"started": 3}, ["step has 3 started and a budget of 2", "all has 3 started and a budget of 2"]),
    ],
)
def test_a_room_that_uses_more_than_it_has_is_named(used: dict[str, int], named: list[str]) -> None:
    found = budget.exceeded({"step": Counter(used)}, ALLOWED)
    assert [line.partition(":")[0] for line in found] == named


def test_every_room_of_the_budget_is_there() -> None:
    for room, numbers in budget.budget().items():
        assert room in ("default", "all") or (ROOT / "tests" / room).exists(), room
        assert numbers.keys() == {"tasks", "started"}, room


def test_slow_tests_and_those_that_stand_for_them_are_there() -> None:
    for test in {*slow.BESIDE, *slow.BESIDE.values()}:
        path, _, name = test.partition("::")
        function = re.sub(r"\[.*", "", name)
        assert f"def {function}" in (ROOT / path).read_text(), test


def test_no_slow_test_stands_for_another() -> None:
    for test, kept in slow.BESIDE.items():
        assert slow.fast_one(kept) is None, f"{kept}, which stands for {test}, is slow itself"

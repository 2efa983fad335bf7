"""Ceilings of statements and files, which only fall; what the suite may start, and what it leaves out."""

from collections import Counter

import pytest

from tests import slow
from tests.harness import budget, size
from tests.harness.places import ROOT


@pytest.mark.parametrize("place", size.PLACES)
def test_every_room_is_at_its_ceiling(place: str) -> None:
    assert size.broken(size.measured(size.PLACES[place]), size.ceilings(place)) == []


@pytest.mark.parametrize(
    ("statements", "files", "said"),
    [
        (98, 4, []),
        (101, 4, ["step has 101 statements, 1 above its ceiling: take some out"]),
        (97, 4, ["step has 97 statements under a ceiling of 100: make size LOWER=1"]),
        (100, 3, ["step has 3 files under a ceiling of 4: make size LOWER=1"]),
    ],
)
def test_rooms_above_and_far_below_are_named(statements: int, files: int, said: list[str]) -> None:
    assert (
        size.broken(
            {"step": {"statements": statements, "files": files}},
            {"step": {"statements": 100, "files": 4, "goal": 50}},
        )
        == said
    )


def test_ceilings_are_lowered_and_never_raised() -> None:
    text = (
        "[runs]\nstep = { tasks = 9 }\n[size.src]\nstep = { statements = 100, files = 4, goal = 50 }  # why\n"
    )
    assert size.lowered(text, {"src": {"step": {"statements": 90, "files": 5}}}) == text.replace("100", "90")


def test_a_room_that_starts_more_than_it_may_is_named() -> None:
    allowed = {
        "step": {"tasks": 3, "started": 2},
        "default": {"tasks": 0, "started": 0},
        "all": {"tasks": 4, "started": 2},
    }
    assert budget.exceeded({"step": Counter(tasks=3, started=2)}, allowed) == []
    named = [line.partition(":")[0] for line in budget.exceeded({"step": Counter(started=3)}, allowed)]
    assert named == ["step has 3 started and a budget of 2", "all has 3 started and a budget of 2"]
    assert all((ROOT / "tests" / room).exists() for room in budget.budget().keys() - {"default", "all"})


def test_slow_tests_and_those_that_stand_for_them_are_there() -> None:
    for test in {*slow.BESIDE, *slow.BESIDE.values()}:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text(), test


def test_no_slow_test_stands_for_another() -> None:
    for test, kept in slow.BESIDE.items():
        assert slow.fast_one(kept) is None, f"{kept}, which stands for {test}, is slow itself"

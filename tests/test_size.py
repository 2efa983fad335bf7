"""Rooms keep their ceilings of statements and files, which only fall."""

from pathlib import Path

import pytest

from tests.harness import size

ALLOWED = {"step": {"statements": 100, "files": 4, "goal": 50}}


@pytest.mark.parametrize("place", size.PLACES)
def test_every_room_is_at_its_ceiling(place: str) -> None:
    assert size.broken(size.measured(size.PLACES[place]), size.ceilings(place)) == []


def test_a_statement_more_is_seen(tmp_path: Path) -> None:
    """A planted statement is counted, wherever it stands."""
    (tmp_path / "step").mkdir()
    module = tmp_path / "step" / "train.py"
    module.write_text('"""One."""\n\nif True:\n    x = 1\n')
    before = size.measured(tmp_path)
    assert before == {"step": {"statements": 3, "files": 1}}
    module.write_text(module.read_text() + "    y = 2\n")
    (line,) = size.broken(size.measured(tmp_path), before)
    assert line == "step has 4 statements, 1 above its ceiling: take some out"


@pytest.mark.parametrize(
    ("statements", "files", "said"),
    [
        (100, 4, []),
        (98, 4, []),
        (101, 4, ["step has 101 statements, 1 above its ceiling: take some out"]),
        (97, 4, ["step has 97 statements under a ceiling of 100: make size LOWER=1"]),
        (100, 3, ["step has 3 files under a ceiling of 4: make size LOWER=1"]),
    ],
)
def test_rooms_above_and_far_below_are_named(statements: int, files: int, said: list[str]) -> None:
    assert size.broken({"step": {"statements": statements, "files": files}}, ALLOWED) == said


def test_ceilings_are_lowered_and_never_raised() -> None:
    text = (
        "[runs]\nstep = { tasks = 9 }\n[size.src]\nstep = { statements = 100, files = 4, goal = 50 }  # why\n"
    )
    found = {"src": {"step": {"statements": 90, "files": 5}}}
    assert size.lowered(text, found) == text.replace("100", "90")

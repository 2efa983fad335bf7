"""Statements and files of each room, and the ceilings that they have to keep: ``make size``.

A statement is a node ``ast.stmt`` of the syntax tree, docstrings and imports included. The ceilings are in
``budget.toml``, with the goal of each room of src. They only fall: a room above its ceiling fails the tests,
and so does one that is further below it than ``SLACK``, until the ceiling follows (``make size LOWER=1``).
"""

import ast
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from tests.harness.places import ROOT

SLACK = 0.02
FILE = ROOT / "tests" / "budget.toml"
PLACES = {"src": ROOT / "src" / "fsdp_sft", "tests": ROOT / "tests"}
Sizes = Mapping[str, Mapping[str, int]]


def measured(place: Path) -> dict[str, dict[str, int]]:
    """Statements and files of each folder of a place, by name; ``root`` is what lies beside the folders."""
    rooms: dict[str, dict[str, int]] = {}
    for path in sorted(place.rglob("*.py")):
        parts = path.relative_to(place).parts
        room = rooms.setdefault(parts[0] if len(parts) > 1 else "root", {"statements": 0, "files": 0})
        room["statements"] += sum(
            isinstance(node, ast.stmt) for node in ast.walk(ast.parse(path.read_text()))
        )
        room["files"] += 1
    return rooms


def ceilings(place: str) -> dict[str, dict[str, int]]:
    """What each room of ``"src"`` or ``"tests"`` may have, and its goal if there is one."""
    return tomllib.loads(FILE.read_text())["size"][place]


def broken(found: Sizes, allowed: Sizes) -> list[str]:
    """The rooms that are above their ceilings, or far below them, in words."""
    lines = []
    for room in sorted(found.keys() | allowed.keys()):
        has, may = found.get(room, {"statements": 0, "files": 0}), allowed.get(room)
        if may is None:
            lines.append(
                f"{room} has no ceiling: a new room takes its statements from others, named in {FILE.name}"
            )
            continue
        for what in ("statements", "files"):
            if has[what] > may[what]:
                lines.append(
                    f"{room} has {has[what]} {what}, {has[what] - may[what]} above its ceiling: take some out"
                )
            elif has[what] < may[what] * (1 - SLACK):
                lines.append(
                    f"{room} has {has[what]} {what} under a ceiling of {may[what]}: make size LOWER=1"
                )
    return lines


def lowered(text: str, found: Mapping[str, Sizes]) -> str:
    """``budget.toml`` with each ceiling that is above what was found brought down to it; none is raised."""
    lines, rooms = [], {}
    for line in text.splitlines():
        if section := re.fullmatch(r"\[(.+)\]", line):
            rooms = found.get(section[1].removeprefix("size."), {})
        if (named := re.match(r'"?([\w.]+)"? = \{ statements', line)) and named[1] in rooms:
            for what, number in rooms[named[1]].items():
                line = re.sub(
                    rf"\b{what} = (\d+)", lambda m, n=number, w=what: f"{w} = {min(int(m[1]), n)}", line
                )
        lines.append(line)
    return "\n".join(lines) + "\n"


def table(found: Sizes, allowed: Sizes) -> list[str]:
    """What each room has, its ceilings and its goal, as lines."""
    lines = [f"{'':14s}{'statements':>12s}{'ceiling':>9s}{'goal':>7s}{'files':>7s}{'ceiling':>9s}"]
    total = {
        key: sum(room.get(key, 0) for room in allowed.values()) for key in ("statements", "goal", "files")
    }
    every = {key: sum(room[key] for room in found.values()) for key in ("statements", "files")}
    for room, has, may in [
        *((room, has, allowed.get(room, {})) for room, has in found.items()),
        ("all", every, total),
    ]:
        goal = may.get("goal") or ""
        lines.append(
            f"{room:14s}{has['statements']:12,d}{may.get('statements', 0):9,d}{goal:>7}"
            f"{has['files']:7d}{may.get('files', 0):9d}"
        )
    return lines


def main() -> None:
    """Print the tables; with ``lower`` write the lower ceilings first."""
    found = {name: measured(place) for name, place in PLACES.items()}
    if sys.argv[1:] == ["lower"]:
        FILE.write_text(lowered(FILE.read_text(), found))
    for name, rooms in found.items():
        print(f"{name}\n" + "\n".join(table(rooms, ceilings(name))) + "\n")


if __name__ == "__main__":
    main()

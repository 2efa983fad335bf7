"""A run of tests that can be stopped and gone on with: by a log, tests that have passed are not run again.

    python -m pytest -m slow --log-outcomes slow-tests.jsonl

The log belongs to the tree that was tested: a run of another one begins it anew.
"""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.harness.places import ROOT


def tree() -> str:
    """The commit, and whether something differs from it."""
    named = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(named, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


class Outcomes:
    """The log of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, version: str) -> None:
        """Begin a log for a version of the tree, unless it is the log's already."""
        lines = self._lines()
        if not lines or lines[0].get("tree") != version:
            self.path.write_text(json.dumps({"tree": version, "begun": time.strftime("%F %T")}) + "\n")

    def passed(self) -> set[str]:
        """Ids of the tests that need not run again."""
        last = {line["test"]: line["outcome"] for line in self._lines() if "test" in line}
        return {test for test, outcome in last.items() if outcome != "failed"}

    def add(self, test: str, outcome: str, seconds: float) -> None:
        """Note an outcome: passed, failed or skipped."""
        with self.path.open("a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "seconds": round(seconds, 1)}) + "\n")

    def summary(self) -> Iterable[str]:
        """What the log says by now, in lines."""
        lines = self._lines()
        last = {line["test"]: line for line in lines if "test" in line}
        counts = Counter(line["outcome"] for line in last.values())
        seconds = sum(line["seconds"] for line in last.values())
        yield (
            f"{self.path}: tree {lines[0]['tree']}, begun {lines[0]['begun']}: {counts['passed']} passed, "
            f"{counts['skipped']} skipped, {counts['failed']} failed, {seconds / 60:.0f} minutes of tests"
        )
        yield from (f"failed: {test}" for test, line in last.items() if line["outcome"] == "failed")

    def _lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        whole = [line for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [json.loads(line) for line in whole]

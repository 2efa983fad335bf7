"""Every error that a test waits for, as tests/harness/refusals.py notes it."""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.harness.refusals import FILE


def now(arguments: Any, frozen: Any) -> dict[str, Any]:
    """By test and function of the library: each kind of refusal, with the ranks that raise it.

    Runs the suite, unless a log of such a run is given.
    """
    if arguments.log is not None:
        return _sorted(arguments.log)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "refusals.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-n", str(arguments.workers)]
        subprocess.run(command, env={**os.environ, FILE: str(log)}, check=False)
        return _sorted(log)


def _sorted(log: Path) -> dict[str, Any]:
    ranks: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        rank, key = entry.pop("rank"), f"{entry.pop('test')} {entry.pop('call')}"
        ranks[key][json.dumps(entry, sort_keys=True)].add(rank)
    return {
        key: [{**json.loads(kind), "ranks": sorted(on)} for kind, on in sorted(kinds.items())]
        for key, kinds in ranks.items()
    }

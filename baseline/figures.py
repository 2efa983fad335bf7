"""Time and memory of the present tree over those of the baseline's commit, alternating."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROUNDS = 5
RANKS = 2
SCRIPT = ROOT / "baseline" / "measured.py"


def measured() -> str:
    """A line for each figure: medians of both, and the median ratio within a round."""
    with tempfile.TemporaryDirectory() as name:
        folder, before = Path(name), Path(name) / "before"
        commit = _git("log", "-1", "--format=%H", "--diff-filter=A", "--", "baseline/__init__.py")
        _git("worktree", "add", "--detach", str(before), commit)
        try:
            subprocess.run([sys.executable, str(SCRIPT), "make", name], check=True)
            rounds = [(_one(before, folder), _one(ROOT, folder)) for _ in range(ROUNDS)]
        finally:
            _git("worktree", "remove", "--force", str(before))
    lines = [f"{'':16}{commit[:8]:>10}{'now':>10}{'ratio':>8}  of {ROUNDS} rounds, {RANKS} ranks"]
    for figure in rounds[0][0]:
        pairs = [(old[figure], new[figure]) for old, new in rounds]
        old, new = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(after / earlier for earlier, after in pairs)
        lines.append(f"{figure:16}{old:10.3f}{new:10.3f}{ratio:8.2f}")
    return "\n".join(lines)


def _one(tree: Path, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [*command, str(SCRIPT), str(folder)],
        env=environment,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    figures: dict[str, float] = json.loads(told.stdout.splitlines()[-1])
    return figures


def _git(*arguments: str) -> str:
    told = subprocess.run(["git", *arguments], cwd=ROOT, check=True, text=True, capture_output=True)
    return told.stdout.strip()

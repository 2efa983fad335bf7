"""The notebook, cell by cell, as a program: what it writes is trained, exported and asked."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.harness.places import EXAMPLES

NOTEBOOK = EXAMPLES / "first_run.ipynb"


def _as_python(source: str) -> str:
    """A cell without IPython: files written, commands run, packages left as they are."""
    if source.startswith("%%writefile "):
        first, _, rest = source.partition("\n")
        return f"Path({first.split()[1]!r}).write_text({rest!r})"
    lines = []
    for line in source.splitlines():
        if line.startswith("!"):
            line = f"subprocess.run(f{line[1:]!r}, shell=True, check=True)"
        lines.append("" if line.startswith("%pip") else line)
    return "\n".join(lines)


def test_every_cell_runs_the_model_learns_and_answers(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(cell.get("outputs", []) == [] for cell in cells)  # nothing of a run is kept
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = "\n\n".join(["import subprocess", *map(_as_python, sources)])
    assert "STEPS = 160" in program
    bin_folder = str(Path(sys.executable).parent)
    done = subprocess.run(
        [sys.executable, "-c", program.replace("STEPS = 160", "STEPS = 40")],
        cwd=tmp_path / "examples",
        env={
            **os.environ,
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": f"{tmp_path / 'examples'}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "⟦It is called" in done.stdout
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2, losses
    assert done.stdout.count("(wanted: It is called ") == 5

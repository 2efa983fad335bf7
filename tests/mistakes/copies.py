"""Copies of the library with a mistake in them."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.places import ROOT
from tests.mistakes.mistake import Mistake


@contextmanager
def made(mistake: Mistake) -> Iterator[dict[str, str]]:
    """A copy of the library with the mistake in it; the environment in which that is what is imported."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        path = copy / "fsdp_sft" / mistake.file
        text = path.read_text()
        if text.count(mistake.old) != 1:
            raise SystemExit(f"{mistake.name}: {mistake.file} has changed; bring this script up to date")
        path.write_text(text.replace(mistake.old, mistake.new))
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        where = "import fsdp_sft, pathlib; print(pathlib.Path(fsdp_sft.__file__).parent.parent)"
        found = subprocess.run(
            [sys.executable, "-c", where], env=environment, capture_output=True, text=True, check=True
        )
        assert Path(found.stdout.strip()).samefile(copy), "the copy is not what is imported"
        yield environment

"""Where things are: in a checkout, and in an unpacked source package."""

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def script(name: str, folder: Path = EXAMPLES) -> Any:
    """A script of examples/ as a module; it finds its neighbours as it does when it runs."""
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        return importlib.import_module(name)

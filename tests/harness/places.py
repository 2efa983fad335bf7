"""Where things are: in a checkout, and in an unpacked source package."""

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def script(name: str, folder: Path = EXAMPLES) -> Any:
    """A script of examples/ as a module; it finds its neighbours as it does when it runs."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))

"""Where things are: in a checkout, and in an unpacked source package."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

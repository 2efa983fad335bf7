"""Which test notices each mistake of benchmarks/checks/mistakes."""

from typing import Any

from benchmarks.checks.mutations import read_log


def now(arguments: Any, frozen: Any) -> dict[str, Any]:
    """By mistake: the test that fails for it, from a log of ``python -m benchmarks.checks.mutations``."""
    return dict(read_log(arguments.log))

"""Which tests run on simulated devices, and why the others do not; the run prints the reasons."""

import sys

import pytest

# Beginnings of test ids.
REASONS: dict[str, str] = {
    "tests/weights/test_memory.py": "counts this process's memory, and a simulated device is made of it",
    "tests/attention/context_parallel/test_exact.py::test_two_ranks_share_rows[Llama4": (
        "the backward of complex numbers, which plain Llama 4 rotates with, ends such a process"
    ),
    "tests/check/test_planted.py::test_what_is_asked_for_trains_as_in_one_process[compiled]": (
        "inductor writes code for devices that it knows"
    ),
    "tests/jobs/test_watchdog.py::test_the_rank_is_named_on_all_that_live_within_the_set_time[exchange-2": (
        "the host of a rank that waits goes on until it needs the device, so it is not seen in the exchange; "
        "the other rank is named all the same, as the one without progress"
    ),
}

_STARTS_RANKS = {"on_ranks", "run_distributed", "run_simulated", "for_ranks", "for_launched", "Program"}


def reason(nodeid: str) -> str | None:
    """Why a test of several ranks is not run on simulated devices; None if it is."""
    return next((why for start, why in REASONS.items() if nodeid.startswith(start)), None)


def starts_ranks(item: pytest.Item) -> bool:
    """Whether the module of a test, or one of those of which it has a function, knows how to start ranks.

    What starts none runs in the process of pytest, which has no simulated device.
    """
    if not isinstance(item, pytest.Function):
        return False
    names = {str(getattr(value, "__module__", "")) for value in vars(item.module).values()}
    others = (sys.modules[name] for name in names if name.startswith("tests."))
    return any(_STARTS_RANKS & vars(module).keys() for module in (item.module, *others))

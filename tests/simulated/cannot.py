"""Which tests run on simulated devices, and why the others do not; the run prints the reasons."""

import types
from collections.abc import Iterator
from typing import Any

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

_STARTS_RANKS = {"run_distributed", "run_simulated", "for_ranks", "for_launched", "Program"}


def reason(nodeid: str) -> str | None:
    """Why a test of several ranks is not run on simulated devices; None if it is."""
    return next((why for start, why in REASONS.items() if nodeid.startswith(start)), None)


def starts_ranks(item: pytest.Item) -> bool:
    """Whether a test, one of its fixtures or a function of the tests that they call starts ranks.

    What starts none runs in the process of pytest, which has no simulated device.
    """
    functions: list[Any] = [item.function] if isinstance(item, pytest.Function) else []
    functions += [definitions[-1].func for definitions in _fixtures(item).values()]
    seen: set[int] = set()
    while functions:
        function = functions.pop()
        if id(function) in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(id(function))
        names = set(_names(function.__code__))
        if names & _STARTS_RANKS:
            return True
        found = (function.__globals__.get(name) for name in names)
        functions += [other for other in found if getattr(other, "__module__", "").startswith("tests.")]
    return False


def _fixtures(item: pytest.Item) -> dict[str, Any]:
    """Fixtures by name, without those of every test."""
    names: dict[str, Any] = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009  pytest has no other name
    return {name: found for name, found in names.items() if "conftest" not in found[-1].func.__module__}


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)

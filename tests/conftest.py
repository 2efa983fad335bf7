"""Before any test module is imported."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

# Two workers of pytest and their ranks share the cores: threads of one would only wait for those of another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store asks for the names of the addresses that connect to it; without a name server that takes 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Not before: torch reads these settings as it is imported.
from tests.harness import budget, device


def pytest_configure(config: pytest.Config) -> None:
    """From the start: count what is started."""
    budget.watch()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands its counts over; the process that prints the summary judges them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["budget"] = {room: dict(used) for room, used in budget.counts.items()}
    elif budget.verdict(session.config, device.asked()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of a worker of pytest-xdist."""
    for room, used in getattr(node, "workeroutput", {}).get("budget", {}).items():
        budget.counts.setdefault(room, Counter()).update(used)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What a test starts is its room's."""
    budget.running = item.nodeid
    yield
    budget.running = None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked ``accelerator`` runs on ranks of both kinds, unless the setting says that all do."""
    if metafunc.definition.get_closest_marker("accelerator") and device.asked() == "cpu":
        metafunc.parametrize("kind_of_device", ["cpu", "sim"], indirect=True)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that a faster one stands for are slow. On simulated devices, others are left out, or say why."""
    from tests.simulated.cannot import reason, starts_ranks
    from tests.slow import fast_one

    if device.asked() != "sim":
        for item in items:
            if fast_one(item.nodeid) is not None:
                item.add_marker(pytest.mark.slow)
        return
    without = [item for item in items if not starts_ranks(item)]
    config.hook.pytest_deselected(items=without)
    items[:] = [item for item in items if item not in without]
    for item in items:
        why = reason(item.nodeid)
        if why is not None:
            item.add_marker(pytest.mark.skip(why))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported by now stays, and need not be collected again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def kind_of_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """What ranks compute on."""
    with device.asking(getattr(request, "param", device.asked())):
        yield


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What the tests have started."""
    terminalreporter.section("process groups and process starts")
    for line in budget.table():
        terminalreporter.line(line)
    for line in budget.verdict(config, device.asked()):
        terminalreporter.line(line, red=True)


@pytest.fixture(autouse=True)
def settings_stay() -> Iterator[None]:
    """A test leaves the settings of its process as it found them, for the tests after it."""
    from tests.harness.leftovers import changes, settings

    before = settings()
    for name in ("warnings", "threads"):  # pytest puts filters back itself; threads may be about to end
        before.pop(name)
    yield
    after = settings()
    found = {name: (before[name], after[name]) for name in changes(before, after)}
    if "environment" in found:  # of which only what differs is for other eyes
        old, new = (set(variables.items()) for variables in found["environment"])
        found["environment"] = old - new, new - old
    assert not found, f"changed for the tests that follow: {found}"


@pytest.fixture(autouse=True)
def roots_are_free() -> Iterator[None]:
    """What a test has saved below is free afterwards, as at the end of a process."""
    yield
    saving = sys.modules.get("fsdp_sft.dcp_io.saving")
    if saving is not None:
        saving._held.clear()


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Memory that nobody has written to holds NaN, here and in the ranks that are started."""
    from tests.harness.poison import poisoned

    with poisoned():
        yield

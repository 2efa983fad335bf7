"""All checks, one after the other, below a watchdog: what each has found, and where they have ended."""

import importlib
import math
import pkgutil
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

from fsdp_sft._ranks.agree import agree_on, raise_first, share
from fsdp_sft._ranks.words import ranks_named
from fsdp_sft.check import checks
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.mechanism import Check, Outcome, Trouble
from fsdp_sft.check.raised import Raised
from fsdp_sft.check.results import Finished
from fsdp_sft.errors import LostRankError, RemoteRankError
from fsdp_sft.jobs.watchdog import Watchdog

_PATIENCE = 3.0  # times its seconds that a check may take before the watchdog asks what it waits for
_AT_LEAST = 15.0  # seconds that it may always take


def all_checks() -> list[Check]:
    """The checks of all files in ``checks/``, in the order in which they run."""
    names = sorted(module.name for module in pkgutil.iter_modules(checks.__path__))
    found = [importlib.import_module(f"{checks.__name__}.{name}").CHECK for name in names]
    return sorted(found, key=lambda check: check.order)


def run_checks(
    cluster: Cluster,
    which: Iterable[Check],
    *,
    watchdog: Watchdog | None = None,
    tell: Callable[[Finished], None] = lambda one: None,
    raised: Raised | None = None,
    until: float = math.inf,
) -> list[Finished]:
    """Run checks one after the other.

    Args:
        cluster: The ranks.
        which: The checks, in order.
        watchdog: The one that this is below; it learns which check runs.
        tell: Called with each check that is done.
        raised: Tells the other ranks of errors; None makes one.
        until: Time in rank 0's ``time.perf_counter()`` after which no check begins. The others are failures.

    Returns:
        What each check found, the same on all ranks.

    Raises:
        ValueError: If ranks have other checks: another version of this library, or other options.
        LostRankError: If a rank has died.
        RemoteRankError: If a rank has left a check that the others are in.

    Collective: all ranks.
    """
    which = list(which)
    raised = raised or Raised(cluster)
    cluster.watchdog = watchdog
    agree_on("choosing checks", checks=tuple(check.name for check in which))
    done: list[Finished] = []
    for number, check in enumerate(which):
        limit = max(_PATIENCE * check.seconds * cluster.scale, _AT_LEAST) * cluster.crowding
        start = time.perf_counter()
        has_time = share(start < until)
        if watchdog is not None:
            watchdog.step(number)
        with nullcontext() if watchdog is None else watchdog.phase(check.name, timeout=limit):
            outcome = _outcome(cluster, check, raised) if has_time else _out_of_time(cluster)
        cluster.measured[check.name] = outcome.measured
        done.append(Finished(check, outcome, time.perf_counter() - start))
        tell(done[-1])
    return done


def _out_of_time(cluster: Cluster) -> Outcome:
    text = f"not checked: the {cluster.asked.seconds:g} seconds had passed; give more (--seconds)"
    return Outcome(troubles=(Trouble("fail", (), text),), unseen="out of time")


def _outcome(cluster: Cluster, check: Check, raised: Raised) -> Outcome:
    """What a check says; an error that it raises becomes a trouble of the rank that raised it."""
    error: Exception | None = None
    outcome = Outcome()
    try:
        outcome = check.run(cluster)
    except (LostRankError, RemoteRankError):
        raise
    except BaseException as caught:
        raised.tell(caught)
        if not isinstance(caught, Exception):
            raise
        error = caught
    try:
        raise_first(error, f"checking {check.name}")
    except (LostRankError, RemoteRankError):
        raise
    except Exception as first:
        raised.withdraw()
        notes = " ".join(getattr(first, "__notes__", []))
        text = f"raised {type(first).__name__}: {str(first).splitlines()[0] if str(first) else ''}"
        return Outcome(troubles=(Trouble("fail", ranks_named(notes)[:1], text),))
    return outcome

"""Compositions of features beside plain training: the draws themselves, with how each ended."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from tests.compositions.axes import AXES, full, settled
from tests.compositions.log import tried
from tests.harness.architectures import quiet, quiet_for_good


def now(arguments: Any, frozen: Any) -> dict[str, Any]:
    """By draw, as JSON of its options that are not the plainest: how it ended, and why.

    To freeze them, a log of ``python -m tests.compositions`` is needed.
    """
    if frozen is None:
        lines = list(map(json.loads, arguments.log.read_text().splitlines()))[1:]
        entries = [(line["draw"], line["outcome"]) for line in lines if line["number"] < arguments.number]
        return {json.dumps(draw, sort_keys=True): _ending(outcome) for draw, outcome in entries}
    draws = [settled(full(json.loads(draw))) for draw in sorted(frozen)]
    tasks = [(number, draw, arguments.seed) for number, draw in enumerate(draws)]
    found = {}
    spawn = multiprocessing.get_context("spawn")
    with (
        quiet(),
        ProcessPoolExecutor(arguments.workers, mp_context=spawn, initializer=quiet_for_good) as pool,
    ):
        for done in as_completed([pool.submit(tried, task) for task in tasks]):
            entry = done.result()
            draw = {axis: option for axis, option in entry.draw.items() if option != AXES[axis][0]}
            found[json.dumps(draw, sort_keys=True)] = _ending([entry.outcome.kind, entry.outcome.reason])
    return found


def _ending(outcome: list[str]) -> str:
    """How a draw ended; the wording of a reason is free."""
    return outcome[0]

"""Lists of calls in random order beside the same in plain PyTorch: the programs, and how they ended."""

import dataclasses
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.harness.architectures import quiet, quiet_for_good
from tests.programs.judge import judge
from tests.programs.writing import Program, drawn


def now(arguments: Any, frozen: Any) -> dict[str, Any]:
    """By program, as JSON: how it ended, with the numbers of its steps and of those that were refused."""
    if frozen is None:
        programs = [_as_json(drawn(arguments.seed + number)) for number in range(arguments.number)]
    else:
        programs = sorted(frozen)
    spawn = multiprocessing.get_context("spawn")
    with (
        quiet(),
        ProcessPoolExecutor(arguments.workers, mp_context=spawn, initializer=quiet_for_good) as pool,
    ):
        return dict(zip(programs, pool.map(_end_of, programs), strict=True))


def _end_of(program: str) -> dict[str, Any]:
    outcome = judge(Program(**{name: _tuples(value) for name, value in json.loads(program).items()}))
    return {"kind": outcome.kind, "steps": outcome.steps, "refused": outcome.refused}


def _tuples(value: Any) -> Any:
    """JSON has lists where a program has tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _as_json(program: Program) -> str:
    return json.dumps(dataclasses.asdict(program), sort_keys=True)

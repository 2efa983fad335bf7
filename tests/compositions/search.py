"""A worker's share of a search, and how its draws ended."""

import argparse
import json
from collections import Counter
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings

from tests.compositions.axes import differences
from tests.compositions.drawing import compositions
from tests.compositions.judge import judge
from tests.programs.judge import judge as judge_program
from tests.programs.writing import programs


def search(arguments: argparse.Namespace, worker: int) -> str:
    """One worker's share of the draws: how they ended, or the fault."""
    ends: Counter[str] = Counter()
    strategy = programs() if arguments.programs else compositions(json.loads(arguments.where))

    @hypothesis.seed(arguments.seed * arguments.workers + worker)
    @settings(
        max_examples=-(-arguments.number // arguments.workers),
        deadline=None,
        phases=set(Phase) - ({Phase.shrink, Phase.reuse} if arguments.no_shrink else {Phase.explain}),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(strategy)
    def trial(drawn: Any) -> None:
        outcome = judge_program(drawn) if arguments.programs else judge(drawn, arguments.seed)
        ends[f"{outcome.kind} {outcome.reason}".strip() if outcome.kind == "refused" else outcome.kind] += 1
        what = drawn if arguments.programs else json.dumps(differences(drawn))
        assert outcome.kind != "fault", f"FAULT {what}\n{outcome.reason}"

    try:
        trial()
    except AssertionError as fault:
        return f"{fault}\nfound in {ends.total()} draws"
    return "\n".join(f"{count:6} {end}" for end, count in ends.most_common())

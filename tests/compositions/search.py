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


def search(arguments: argparse.Namespace, worker: int) -> str:
    """One worker's share of the draws: how they ended, or the fault."""
    ends: Counter[str] = Counter()

    @hypothesis.seed(arguments.seed * arguments.workers + worker)
    @settings(
        max_examples=-(-arguments.number // arguments.workers),
        deadline=None,
        phases=set(Phase) - ({Phase.shrink, Phase.reuse} if arguments.no_shrink else {Phase.explain}),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(compositions(json.loads(arguments.where)))
    def trial(drawn: Any) -> None:
        outcome = judge(drawn, arguments.seed)
        ends[f"{outcome.kind} {outcome.reason}".strip() if outcome.kind == "refused" else outcome.kind] += 1
        assert outcome.kind != "fault", f"FAULT {json.dumps(differences(drawn))}\n{outcome.reason}"

    try:
        trial()
    except AssertionError as fault:
        return f"{fault}\nfound in {ends.total()} draws"
    return "\n".join(f"{count:6} {end}" for end, count in ends.most_common())

"""Draws of hypothesis: an option of each axis, of which few are refused; and a worker's share of a search."""

import argparse
import json
from collections import Counter
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, assume, settings, strategies as st

from tests.compositions import reasons
from tests.compositions.axes import AXES, DIFFERENCES, differences, settled
from tests.compositions.judge import judge

# Options that take three to twenty times as long as others: a draw has one where a number to this is 0.
COSTLY: dict[tuple[str, str], int] = {
    ("compile", "blocks"): 30,
    ("compile", "fullgraph"): 30,
    ("loader", "sampler and workers"): 20,
    ("mesh", "hsdp 2x2"): 12,
    ("mesh", "cp 2 fsdp 2"): 12,
    ("optimizer", "muon and adamw"): 10,
    **{("odd rank", what): 30 for what in DIFFERENCES[1:]},
}
REFUSED = 10  # in one draw of so many something may be refused: it is soon known, and stops all else


@st.composite
def compositions(draw: Any) -> dict[str, str]:
    """One draw, settled; shrunk, each axis goes to its plainest."""
    drawn = {axis: draw(_options(axis)) for axis in AXES}
    for (axis, option), share in COSTLY.items():
        if draw(st.integers(0, share - 1)) == share - 1:
            drawn[axis] = option
    composition = settled(drawn)
    if draw(st.integers(0, REFUSED - 1)) != REFUSED - 1:
        for _ in range(30):
            refused = reasons.applying(composition)
            if not refused:
                break
            axis = draw(st.sampled_from(refused[0].axes))
            composition = settled({**composition, axis: draw(_options(axis))})
        assume(not reasons.applying(composition))
    return composition


def _options(axis: str) -> Any:
    return st.sampled_from([option for option in AXES[axis] if (axis, option) not in COSTLY])


def search(arguments: argparse.Namespace, worker: int) -> str:
    """One worker's share of the draws: how they ended, or the fault."""
    ends: Counter[str] = Counter()

    @hypothesis.seed(arguments.seed * arguments.workers + worker)
    @settings(
        max_examples=-(-arguments.number // arguments.workers),
        deadline=None,
        phases=set(Phase) - {Phase.explain},
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(compositions())
    def trial(drawn: Any) -> None:
        outcome = judge(drawn, arguments.seed)
        ends[f"{outcome.kind} {outcome.reason}".strip() if outcome.kind == "refused" else outcome.kind] += 1
        assert outcome.kind != "fault", f"FAULT {json.dumps(differences(drawn))}\n{outcome.reason}"

    try:
        trial()
    except AssertionError as fault:
        return f"{fault}\nfound in {ends.total()} draws"
    return "\n".join(f"{count:6} {end}" for end, count in ends.most_common())

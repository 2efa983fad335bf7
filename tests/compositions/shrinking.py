"""A failing draw made as plain as it can be and still fail."""

from collections.abc import Callable

from tests.compositions.axes import AXES, Draw, settled
from tests.compositions.judge import Outcome


def shrink(draw: Draw, judge: Callable[[Draw], Outcome]) -> tuple[dict[str, str], Outcome]:
    """Put axis after axis to its plainest while the draw goes on being a fault.

    The fault may become another on the way: either is one.

    Args:
        draw: One that ``judge`` calls a fault.
        judge: Tries a draw.

    Returns:
        The smallest draw that was found, and its outcome.
    """
    smallest, outcome = dict(draw), judge(draw)
    progress = True
    while progress:
        progress = False
        for axis in [axis for axis in AXES if smallest[axis] != AXES[axis][0]]:
            candidate = settled({**smallest, axis: AXES[axis][0]})
            if candidate == smallest:
                continue
            found = judge(candidate)
            if found.kind == "fault":
                smallest, outcome, progress = candidate, found, True
    return smallest, outcome

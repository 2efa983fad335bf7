"""Draws towards the rarest pairs of options."""

import random
from collections import Counter
from collections.abc import Iterator

from tests.compositions import reasons
from tests.compositions.axes import AXES, Draw, Pair, pairs, settled

CANDIDATES = 40
SLOW = 0.15  # the share that is compiled, and that whose loader starts processes: ten times as long
REFUSED = 0.1  # the share of draws in which something may be refused: it is soon known, and stops all else


def draws(seed: int) -> Iterator[dict[str, str]]:
    """Endless draws; of several at random, the one whose pairs have been drawn least so far.

    Args:
        seed: Of the candidates. The first draws of two lengths are the same.
    """
    generator = random.Random(seed)
    seen: Counter[Pair] = Counter()
    while True:
        refused, slow = generator.random() < REFUSED, generator.random() < SLOW
        candidates = [_candidate(generator, refused=refused, slow=slow) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda draw: sum(1 / (1 + seen[pair]) ** 2 for pair in pairs(draw)))
        seen.update(pairs(best))
        yield best


def _candidate(generator: random.Random, *, refused: bool, slow: bool) -> dict[str, str]:
    drawn = {axis: generator.choice(options) for axis, options in AXES.items()}
    if not slow:
        drawn["compile"] = "no"
        drawn["loader"] = generator.choice([way for way in AXES["loader"] if "workers" not in way])
    draw = settled(drawn)
    while not refused and (applying := reasons.applying(draw)):
        draw = _without(draw, applying[0], generator)
    return draw


def _without(draw: Draw, reason: reasons.Reason, generator: random.Random) -> dict[str, str]:
    """Draw the axes of a reason again until it does not apply; what else was drawn stays."""
    while reason.applies(draw):
        again = {axis: generator.choice(AXES[axis]) for axis in reason.axes}
        draw = settled({**draw, **again})
    return dict(draw)

"""Draws towards the rarest pairs of options."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator

from tests.compositions import reasons
from tests.compositions.axes import AXES, Draw, Pair, full, pairs, settled

Option = tuple[str, str]  # of an axis

CANDIDATES = 40  # at random; half as many more have one of the rarest pairs in them
# Options that take three to twenty times as long as others, and the share of draws that each gets.
COSTLY: dict[Option, float] = {
    ("compile", "blocks"): 0.028,
    ("compile", "fullgraph"): 0.028,
    ("loader", "sampler and workers"): 0.04,
    ("mesh", "hsdp 2x2"): 0.07,
    ("mesh", "cp 2 fsdp 2"): 0.07,
    ("optimizer", "muon and adamw"): 0.08,
}
_ATTEMPTS = 30
_LEFT_FROM = 400  # the draw from which pairs that have never run come first
REFUSED = 0.1  # the share of draws in which something may be refused: it is soon known, and stops all else


def draws(seed: int) -> Iterator[dict[str, str]]:
    """Endless draws; of several at random, the one whose pairs have been drawn least so far.

    Args:
        seed: Of the candidates. The first draws of two lengths are the same.
    """
    generator = random.Random(seed)
    allowed = sorted(allowed_pairs())
    seen: Counter[Pair] = Counter()
    run: Counter[Pair] = Counter()  # in draws that nothing refuses
    for number in itertools.count():
        refused = generator.random() < REFUSED
        costly = {option for option, share in COSTLY.items() if generator.random() < share}
        left = [pair for pair in allowed if not run[pair]]
        if number >= _LEFT_FROM and left:
            refused, costly = False, COSTLY.keys() & set(generator.choice(left))
        fitting = [pair for pair in allowed if COSTLY.keys() & set(pair) <= costly]
        forced = _rarest([pair for pair in fitting if costly & set(pair)] or fitting, run, generator)
        pairs_in: list[Pair | None] = [None] * CANDIDATES
        pairs_in += [] if refused else forced
        candidates = [_candidate(generator, pair, refused=refused, costly=costly) for pair in pairs_in]
        best = max(candidates, key=lambda draw: sum(1 / (1 + seen[pair]) ** 2 for pair in pairs(draw)))
        seen.update(pairs(best))
        if not reasons.applying(best):
            run.update(pairs(best))
        yield best


def allowed_pairs() -> set[Pair]:
    """Pairs that the library says it runs: beside all else plainest, no reason refuses them."""
    allowed = set()
    for axis, options in AXES.items():
        for other, others in AXES.items():
            for option in options if axis < other else ():
                for second in others:
                    draw = settled(full({axis: option, other: second}))
                    if (draw[axis], draw[other]) == (option, second) and not reasons.applying(draw):
                        allowed.add(((axis, option), (other, second)))
    return allowed


def _rarest(allowed: list[Pair], seen: Counter[Pair], generator: random.Random) -> list[Pair]:
    shuffled = generator.sample(allowed, len(allowed))
    return sorted(shuffled, key=lambda pair: seen[pair])[: CANDIDATES // 2]


def _candidate(
    generator: random.Random, pair: Pair | None, *, refused: bool, costly: set[Option]
) -> dict[str, str]:
    drawn = {}
    for axis, options in AXES.items():
        own = [option for option in options if (axis, option) in costly]
        drawn[axis] = generator.choice(own or [o for o in options if (axis, o) not in COSTLY])
    drawn.update(pair or ())
    draw = settled(drawn)
    while not refused and (applying := reasons.applying(draw)):
        draw = _without(draw, applying[0], generator, dict(pair or ()))
    return draw


def _without(
    draw: Draw, reason: reasons.Reason, generator: random.Random, kept: dict[str, str]
) -> dict[str, str]:
    """Draw the axes of a reason again until it does not apply; what else was drawn stays.

    Args:
        draw: To which the reason applies.
        reason: Of a refusal.
        generator: Of the options.
        kept: Options to stay if that is possible.
    """
    for attempt in itertools.count():
        again = {axis: generator.choice(AXES[axis]) for axis in reason.axes}
        draw = settled({**draw, **again, **(kept if attempt < _ATTEMPTS else {})})
        if not reason.applies(draw):
            break
    return dict(draw)

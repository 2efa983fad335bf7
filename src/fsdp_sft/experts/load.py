"""How many tokens the experts of each layer were given."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertLoad:
    """How many tokens each expert of each layer was given in a window, on all ranks; padding is not counted.

    Attributes:
        layers: FQNs of the modules that hold the experts, in forward order.
        counts: Tokens of each expert, by layer. Of a layer they add up to tokens times ``top_k``.

    Example:
        >>> load = ExpertLoad(("layers.0.experts",), ((6, 2, 0, 0),))
        >>> load.largest_over_mean, load.dead
        ((3.0,), (2,))
    """

    layers: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def largest_over_mean(self) -> tuple[float, ...]:
        """The busiest expert's tokens over its layer's mean, by layer; 1 where all have the same."""
        return tuple(max(layer) * len(layer) / max(sum(layer), 1) for layer in self.counts)

    @property
    def entropy(self) -> tuple[float, ...]:
        """Entropy of a layer's shares over that of equal ones, by layer; 1 even, 0 all to one expert."""
        return tuple(_entropy(layer) for layer in self.counts)

    @property
    def dead(self) -> tuple[int, ...]:
        """Experts that were given no token, by layer."""
        return tuple(layer.count(0) for layer in self.counts)

    def summary(self) -> dict[str, float]:
        """Three numbers for a log: the worst layer's two, and dead experts of all layers."""
        return {
            "expert_load_largest_over_mean": max(self.largest_over_mean),
            "expert_load_entropy": min(self.entropy),
            "dead_experts": float(sum(self.dead)),
        }


def _entropy(counts: tuple[int, ...]) -> float:
    total = sum(counts)
    if not total or len(counts) == 1:
        return 1.0 if total else 0.0
    shares = [count / total for count in counts if count]
    return abs(sum(share * math.log(share) for share in shares)) / math.log(len(counts))

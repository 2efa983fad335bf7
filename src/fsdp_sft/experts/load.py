"""Number of tokens that the experts of each layer were given."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertLoad:
    """Number of tokens that each expert of each layer was given in a window, on all ranks, without padding.

    Attributes:
        layers: FQNs of the modules that hold the experts, in forward order.
        counts: Number of tokens of each expert, by layer. In a layer they add up to tokens times ``top_k``.

    Example:
        >>> load = ExpertLoad(("layers.0.experts",), ((6, 2, 0, 0),))
        >>> load.largest_over_mean, load.dead
        ((3.0,), (2,))
    """

    layers: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def largest_over_mean(self) -> tuple[float, ...]:
        """Tokens of the busiest expert divided by the mean of its layer, by layer; 1 if all have the same."""
        return tuple(max(layer) * len(layer) / max(sum(layer), 1) for layer in self.counts)

    @property
    def entropy(self) -> tuple[float, ...]:
        """Entropy of the experts' shares, relative to that of equal shares, by layer.

        1 if all experts have the same number of tokens, 0 if one expert has all.
        """
        return tuple(_entropy(layer) for layer in self.counts)

    @property
    def dead(self) -> tuple[int, ...]:
        """Number of experts that were given no token, by layer."""
        return tuple(layer.count(0) for layer in self.counts)

    def summary(self) -> dict[str, float]:
        """Numbers to log: ``largest_over_mean`` and ``entropy`` of the worst layer, and all dead experts."""
        return {
            "expert_load_largest_over_mean": max(self.largest_over_mean),
            "expert_load_entropy": min(self.entropy),
            "dead_experts": float(sum(self.dead)),
        }


def _entropy(counts: tuple[int, ...]) -> float:
    """Entropy of the shares of one layer's experts, relative to that of equal shares."""
    total = sum(counts)
    if not total or len(counts) == 1:
        return 1.0 if total else 0.0
    shares = [count / total for count in counts if count]
    return abs(sum(share * math.log(share) for share in shares)) / math.log(len(counts))

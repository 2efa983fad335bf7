"""Number of tokens that the experts of each layer were given."""

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
    def dead(self) -> tuple[int, ...]:
        """Number of experts that were given no token, by layer."""
        return tuple(layer.count(0) for layer in self.counts)

    def summary(self) -> dict[str, float]:
        """Numbers to log: ``largest_over_mean`` of the worst layer, and all dead experts."""
        return {
            "expert_load_largest_over_mean": max(self.largest_over_mean),
            "dead_experts": float(sum(self.dead)),
        }

"""How evenly the ranks share a model's parameters, and which parameter they share least evenly."""

import math
from dataclasses import dataclass

from fsdp_sft._tensors.shard_dims import imbalance, shard_numel
from fsdp_sft.planner.parameters import Group


@dataclass(frozen=True)
class ShardBalance:
    """How many elements the fullest rank has, compared with the mean.

    Attributes:
        ranks: Number of ranks that the parameters are sharded over.
        largest_over_mean: Elements of the fullest rank divided by the mean; 1.0 is even.
        parameter: Name of the parameter that is most uneven, or of the first of several that are alike; empty
            if all are even.
        shape: Shape of that parameter.
        dim: Dimension along which that parameter is cut.
        parameter_over_mean: The fullest rank's part of that parameter divided by the mean.
        idle_ranks: Number of ranks that have none of that parameter.
    """

    ranks: int
    largest_over_mean: float
    parameter: str = ""
    shape: tuple[int, ...] = ()
    dim: int = 0
    parameter_over_mean: float = 1.0
    idle_ranks: int = 0

    def __str__(self) -> str:
        if not self.parameter:
            return f"all parameters lie evenly on {self.ranks} ranks"
        shape = " x ".join(map(str, self.shape))
        text = (
            f"the fullest of {self.ranks} ranks has {self.largest_over_mean:.3f} times the mean; most uneven "
            f"is {self.parameter} ({shape}), cut along dimension {self.dim}: "
            f"{self.parameter_over_mean:.2f} times"
        )
        return text + (f", {self.idle_ranks} ranks have none of it" if self.idle_ranks else "")


def shard_balance(parts: list[tuple[Group, int, int]], ranks: int) -> ShardBalance:
    """How evenly a model's groups are sharded.

    Args:
        parts: The groups of a model as ``Skeleton.parts`` gives them.
        ranks: Number of ranks that the parameters are sharded over; experts that are distributed are sharded
            over those of them that have the same ones.
    """
    most = total = 0
    worst: tuple[float, str, tuple[int, ...], int, int] = (0.0, "", (), ranks, 0)
    for group, over, count in parts:
        for name, shape, dim in group.with_dims(over):
            here, elements = shard_numel(shape, over, dim), math.prod(shape)
            most, total = most + count * here, total + count * elements * ranks // over
            excess = count * (here - elements / over)
            worst = max(worst, (excess, name, shape, over, dim), key=lambda found: found[0])
    excess, name, shape, over, dim = worst
    if excess < 1 or not total:
        return ShardBalance(ranks, most * ranks / total if total else 1.0)
    size = shape[dim] if shape else 1
    rows = -(-size // over)
    return ShardBalance(
        ranks=ranks,
        largest_over_mean=most * ranks / total,
        parameter=name,
        shape=shape,
        dim=dim,
        parameter_over_mean=imbalance(size, over),
        idle_ranks=(over - -(-size // rows)) * ranks // over,
    )

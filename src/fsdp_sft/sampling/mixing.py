"""Several data sets in one order, in given proportions."""

import zlib
from collections.abc import Sequence, Sized
from itertools import accumulate

import torch

from fsdp_sft.collate.options import check_count


class Mixture:
    """The rows of several data sets in one order, as indices into ``ConcatDataset(datasets)``.

    A sampler deals them out: ``ResumableSampler(mixture)`` rows, ``PackedSampler(lengths, mixture=mixture)``
    packs. Every epoch has a fixed number of rows of each data set, spread evenly over it: any section of an
    epoch has the same proportions, to within a row or two. If an epoch has fewer rows of a data set than
    there are, the next epoch continues with the remaining ones. If it has more, the data set is repeated,
    each time in a new order. So after any number of epochs some rows of a data set have come at most once
    more than the others.

    Args:
        datasets: The data sets, or their numbers of rows.
        weights: Rows of each data set in an epoch, relative to the others; any numbers from 0 on. None takes
            the numbers of rows.
        epoch_rows: Rows of an epoch; None takes the sum over all data sets. Without both arguments an epoch
            has every row once.

    Attributes:
        sizes: Number of rows of each data set.
        counts: Number of rows of each data set in an epoch.

    Raises:
        ValueError: If an argument is out of range, or there are no rows.

    Memory: About 60 bytes a row of an epoch while its order is made.

    Example:
        >>> mixture = fs.Mixture([900, 100], weights=[1, 1], epoch_rows=400)
        >>> order = list(fs.ResumableSampler(mixture))
        >>> mixture.counts, len(order), sum(row >= 900 for row in order)
        ([200, 200], 400, 200)
    """

    def __init__(
        self,
        datasets: Sequence[Sized | int],
        *,
        weights: Sequence[float] | None = None,
        epoch_rows: int | None = None,
    ) -> None:
        self.sizes = [data if isinstance(data, int) else len(data) for data in datasets]
        total = check_count("epoch_rows", sum(self.sizes) if epoch_rows is None else epoch_rows)
        self.counts = _apportioned(self.sizes, self.sizes if weights is None else weights, total)
        self._starts = [0, *accumulate(self.sizes)]

    def __len__(self) -> int:
        """Number of rows of an epoch."""
        return sum(self.counts)

    def rows(self, epoch: int, *, seed: int = 0, shuffle: bool = True) -> list[int]:
        """The rows of an epoch, in order, as indices into the concatenated data sets.

        Args:
            epoch: Number of the epoch, from 0.
            seed: Seed of the order, together with the epoch.
            shuffle: Whether each pass over a data set has a new order.
        """
        rows, places = [], []
        for number, count in enumerate(self.counts):
            if count:
                rows.append(self._rows_of(number, epoch * count, seed, shuffle))
                # A random place for each row in one of `count` equal parts of the epoch: as even as possible
                # without a pattern.
                within = torch.full((count,), 0.5, dtype=torch.float64)
                if shuffle:
                    within.uniform_(generator=_generator("place", seed, number, epoch))
                places.append((torch.arange(count) + within) / count)
        order = torch.argsort(torch.cat(places), stable=True)
        mixed: list[int] = torch.cat(rows)[order].tolist()
        return mixed

    def _rows_of(self, number: int, first: int, seed: int, shuffle: bool) -> torch.Tensor:
        """Rows of an epoch of a data set that is repeated without end, the first of which is ``first``."""
        size, count = self.sizes[number], self.counts[number]
        turns = [
            torch.randperm(size, generator=_generator("rows", seed, number, turn))
            if shuffle
            else torch.arange(size)
            for turn in range(first // size, -(-(first + count) // size))
        ]
        start = first % size
        return torch.cat(turns)[start : start + count] + self._starts[number]


def _generator(what: str, seed: int, number: int, turn: int) -> torch.Generator:
    """A generator seeded for one purpose, data set and pass or epoch."""
    return torch.Generator().manual_seed(zlib.crc32(f"{what} {seed} {number} {turn}".encode()))


def _apportioned(sizes: list[int], weights: Sequence[float], total: int) -> list[int]:
    """Divide ``total`` rows among data sets in proportion to their weights, by largest remainders.

    Each part is the exact one, rounded down or up.

    Raises:
        ValueError: If the weights are not one for each data set, or a data set without rows gets some.
    """
    if len(weights) != len(sizes) or not 0 < sum(weights) < float("inf") or min(weights) < 0:
        raise ValueError(
            f"weights must be one number for each of {len(sizes)} data sets, finite and not negative, "
            f"and not all 0; got {weights}"
        )
    exact = [weight * total / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda number: (parts[number] - exact[number], number))
    for number in by_remainder[: total - sum(parts)]:
        parts[number] += 1
    if any(part and not size for part, size in zip(parts, sizes, strict=True)):
        raise ValueError(f"an epoch has {parts} rows of data sets of {sizes}: give one without rows weight 0")
    return parts

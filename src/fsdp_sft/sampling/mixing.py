"""Several data sets in one order, in given proportions."""

import operator
import zlib
from collections.abc import Sequence, Sized
from itertools import accumulate
from typing import Any

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
        weights: Rows of each data set in an epoch, relative to the others; any numbers from 0 on.
        counts: Rows of each data set in an epoch.
        temperature: A number of at least 1 that makes the rows of each data set proportional to
            ``len(dataset) ** (1 / temperature)``. 1 keeps the proportions of the data; larger numbers raise
            the share of small data sets.
        epoch_rows: Rows of an epoch, with ``weights`` or ``temperature``; None takes the sum over all data
            sets. Without any of these four arguments an epoch has every row once.

    Attributes:
        sizes: Number of rows of each data set.
        counts: Number of rows of each data set in an epoch.

    Raises:
        TypeError: If an argument that must be a number is not one.
        ValueError: If an argument is out of range, contradicts another, or there are no rows.

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
        counts: Sequence[int] | None = None,
        temperature: float | None = None,
        epoch_rows: int | None = None,
    ) -> None:
        self.sizes = [data if isinstance(data, int) else len(data) for data in datasets]
        self.counts = _rows_of_each(self.sizes, weights, counts, temperature, epoch_rows)
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
        parts = []
        for turn in range(first // size, (first + count - 1) // size + 1):
            rows = torch.arange(size)
            if shuffle:
                rows = torch.randperm(size, generator=_generator("rows", seed, number, turn))
            parts.append(rows[max(first - turn * size, 0) : first + count - turn * size])
        return torch.cat(parts) + self._starts[number]


def _generator(what: str, seed: int, number: int, turn: int) -> torch.Generator:
    """A generator seeded for one purpose, data set and pass or epoch."""
    return torch.Generator().manual_seed(zlib.crc32(f"{what} {seed} {number} {turn}".encode()))


def _rows_of_each(
    sizes: list[int],
    weights: Sequence[float] | None,
    counts: Sequence[int] | None,
    temperature: float | None,
    epoch_rows: int | None,
) -> list[int]:
    """Number of rows of each data set in an epoch; the arguments are those of ``Mixture``.

    Raises:
        TypeError: If a weight, a count or the temperature is no number.
        ValueError: If an argument is out of range or contradicts another.
    """
    if not sizes or min(sizes) < 0:
        raise ValueError(f"datasets must be one or more data sets, or their numbers of rows, got {sizes}")
    given = [
        name
        for name, value in (("weights", weights), ("counts", counts), ("temperature", temperature))
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"give one of weights, counts and temperature, got {' and '.join(given)}")
    if epoch_rows is not None and (counts is not None or not given):
        raise ValueError(
            "epoch_rows goes with weights or temperature; counts say by themselves how many rows"
        )
    if counts is not None:
        wanted = [operator.index(count) for count in counts]
    elif not given:
        wanted = list(sizes)
    else:
        if weights is not None:
            shares = [_as_share("weights", weight) for weight in weights]
        else:
            power = _as_share("temperature", temperature)
            if power < 1:
                raise ValueError(f"temperature must be at least 1, got {temperature!r}")
            shares = [float(size) ** (1 / power) if size else 0.0 for size in sizes]
        total = sum(sizes) if epoch_rows is None else epoch_rows
        check_count("epoch_rows", total)
        wanted = _apportioned(shares, total)
    if len(wanted) != len(sizes) or min(wanted) < 0 or not any(wanted):
        raise ValueError(
            f"there are {len(sizes)} data sets, and an epoch must have a number of rows for each of them, "
            f"not negative and not all 0; got {wanted}"
        )
    empty = [
        number for number, (size, want) in enumerate(zip(sizes, wanted, strict=True)) if want and not size
    ]
    if empty:
        raise ValueError(f"data set {empty[0]} has no rows, and {wanted[empty[0]]} are asked for in an epoch")
    return wanted


def _as_share(name: str, value: Any) -> float:
    """``value`` as a float, or an error if it is no number, not finite, or negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {'a number' if name == 'temperature' else 'numbers'}, got {value!r}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be finite and not negative, got {value!r}")
    return float(value)


def _apportioned(shares: list[float], total: int) -> list[int]:
    """Divide ``total`` into whole parts in these proportions, by the method of largest remainders.

    Each part is the exact one, rounded down or up.
    """
    if not any(shares):
        raise ValueError(f"one of the weights must be above 0, got {shares}")
    exact = [share * total / sum(shares) for share in shares]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda number: (parts[number] - exact[number], number))
    for number in by_remainder[: total - sum(parts)]:
        parts[number] += 1
    return parts

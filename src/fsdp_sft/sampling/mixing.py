"""Several data sets in one resumable order, in given proportions."""

import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from fsdp_sft.sampling.packing.bins import as_ints, check_count
from fsdp_sft.sampling.packing.sampler import PackedSampler
from fsdp_sft.sampling.sampler import Placed, ResumableSampler, place_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MixedSampler(Sampler[Any]):
    """Distributes rows of several data sets to ranks, as indices into ``ConcatDataset(datasets)``.

    Every epoch has a fixed number of rows of each data set, spread evenly over it: any section of an epoch
    has the same proportions, to within a row or two. If an epoch has fewer rows of a data set than there are,
    the next epoch continues with the remaining ones. If it has more, the data set is repeated, each time in a
    new order. So after any number of epochs some rows of a data set have come at most once more than the
    others, not counting those repeated to fill an epoch's last round, if it does not divide by the ranks.

    With ``lengths`` and ``max_length`` it distributes packs, as the ``batch_sampler`` of a DataLoader with
    ``PackedCollator``; without them rows, as ``sampler``. Position, epochs, ``windows`` and another number of
    ranks are as with ``PackedSampler`` and ``ResumableSampler``.

    Args:
        datasets: The data sets, or their numbers of rows.
        weights: Rows of each data set in an epoch, relative to the others; any numbers from 0 on.
        counts: Rows of each data set in an epoch.
        temperature: A number of at least 1 that makes the rows of each data set proportional to
            ``len(dataset) ** (1 / temperature)``. 1 keeps the proportions of the data; larger numbers raise
            the share of small data sets.
        epoch_rows: Rows of an epoch, with ``weights`` or ``temperature``; None takes the sum over all data
            sets. Without any of these four arguments an epoch has every row once.
        lengths: Tokens of each row, in one list for all data sets in order, or in a list for each.
        max_length: Most tokens of a pack.
        num_targets: Targets of each row, for packs, in the same form as ``lengths``; see ``PackedSampler``.
        cost: Coefficients of a pack's cost; see ``PackedSampler``.
        shuffle: Whether each pass over a data set has a new order.
        seed: Seed of the order, together with the epoch; the same on all ranks.
        num_replicas: Number of ranks that share the rows; None takes the mesh's or the process group's, or 1.
        rank: This rank; None takes the mesh's or the process group's, or 0.
        mesh: Mesh from ``build_mesh``, instead of ``num_replicas`` and ``rank``; ranks along ``cp`` get the
            same rows. None takes the only one there is.

    Raises:
        TypeError: If an argument that must be a number is not one.
        ValueError: If an argument is out of range, contradicts another, or there are no rows.

    Memory: About 60 bytes a row of an epoch while its order is made, 8 (packs: 20) after that.

    Example:
        >>> sampler = fs.MixedSampler([900, 100], weights=[1, 1], epoch_rows=400)
        >>> order = list(sampler)
        >>> len(order), sum(row >= 900 for row in order)
        (400, 200)
    """

    def __init__(
        self,
        datasets: Sequence[Sized | int],
        *,
        weights: Sequence[float] | None = None,
        counts: Sequence[int] | None = None,
        temperature: float | None = None,
        epoch_rows: int | None = None,
        lengths: Any = None,
        max_length: int | None = None,
        num_targets: Any = None,
        cost: tuple[float, float] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: "DeviceMesh | None" = None,
    ) -> None:
        sizes = [data if isinstance(data, int) else len(data) for data in datasets]
        mixture = Mixture(
            sizes,
            _rows_of_each(sizes, weights, counts, temperature, epoch_rows),
            shuffle=shuffle,
            seed=seed,
        )
        place = place_in(mesh, num_replicas, rank)
        if (lengths is None) != (max_length is None):
            raise ValueError("packs need both lengths and max_length")
        if lengths is None and (num_targets is not None or cost is not None):
            raise ValueError("num_targets and cost are for packs, which need lengths and max_length")
        self._mixture = mixture
        self._order: _MixedRows | _MixedPacks
        if max_length is None:
            self._order = _MixedRows(mixture, *place)
        else:
            flat = _flat("lengths", lengths, sizes)
            targets = None if num_targets is None else _flat("num_targets", num_targets, sizes)
            self._order = _MixedPacks(
                mixture, flat, targets, check_count("max_length", max_length), cost, *place
            )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._order)

    def __len__(self) -> int:
        """Number of rows, or packs, that this rank has left in the current epoch."""
        return len(self._order)

    @property
    def counts(self) -> list[int]:
        """Number of rows of each data set in an epoch."""
        return list(self._mixture.counts)

    @property
    def rows_seen(self) -> list[int]:
        """Number of rows of each data set that training has consumed on all ranks since its start."""
        left = self._mixture.count(self._order.rows_left())
        own = zip(self._mixture.counts, left, strict=True)
        return [self.epoch * count + count - missing for count, missing in own]

    @property
    def epochs(self) -> list[float]:
        """Passes over each data set since the start, as a fraction."""
        return [
            rows / size if size else 0.0
            for rows, size in zip(self.rows_seen, self._mixture.sizes, strict=True)
        ]

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._order.epoch

    @property
    def position(self) -> int:
        """Number of rows, or packs, of the current epoch that all ranks together have consumed."""
        return self._order.position

    @property
    def is_passed_over(self) -> bool:
        """Whether the epoch that was set precedes the restored one, so that it has no rows."""
        return self._order.is_passed_over

    @property
    def num_replicas(self) -> int:
        """Number of ranks that share the rows."""
        return self._order.num_replicas

    @property
    def rank(self) -> int:
        """Index of this rank among those that share the rows."""
        return self._order.rank

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; see ``ResumableSampler.set_epoch``."""
        self._order.set_epoch(epoch)

    def mark_consumed(self, num: int) -> None:
        """Advance the position by ``num`` rows, or packs, on this rank and on every other."""
        self._order.mark_consumed(num)

    def end_epoch(self) -> None:
        """Go to the next epoch if any of the current one has been consumed."""
        self._order.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on; the same on every rank."""
        return self._with_sizes(self._order.state_dict())

    def position_state(self) -> dict[str, Any]:
        """``state_dict`` without its warning about uncounted rows."""
        return self._with_sizes(self._order.position_state())

    def _with_sizes(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "sizes": self._mixture.sizes, "counts": self._mixture.counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, with the same or another number of ranks.

        Raises:
            ValueError: If the state belongs to other data or another order, so that other rows would be left.
        """
        for key, own in (("sizes", self._mixture.sizes), ("counts", self._mixture.counts)):
            if list(state.get(key, ())) != own:
                raise ValueError(
                    f"sampler state has {key}={state.get(key)}, this sampler {own}: the order would differ; "
                    "use the same data sets and proportions, or start a new run"
                )
        self._order.load_state_dict(state)


Placed.register(MixedSampler)  # it has all members of one, through its inner sampler


class Mixture:
    """The order of rows in each epoch.

    Args:
        sizes: Number of rows of each data set.
        counts: Number of rows of each data set in an epoch.
        shuffle: Whether each pass over a data set has a new order.
        seed: Seed of the order.
    """

    def __init__(self, sizes: list[int], counts: list[int], *, shuffle: bool, seed: int) -> None:
        self.sizes, self.counts, self.shuffle, self.seed = sizes, counts, shuffle, seed
        self._starts = [0, *accumulate(sizes)]

    def rows(self, epoch: int) -> list[int]:
        """The rows of an epoch, in order, as indices into the concatenated data sets."""
        rows, places = [], []
        for number, count in enumerate(self.counts):
            if count:
                rows.append(self._rows_of(number, epoch * count, count))
                spread = torch.arange(count, dtype=torch.float64)
                # A random place for each row in one of `count` equal parts of the epoch: as even as possible
                # without a pattern.
                spread += (
                    torch.rand(count, dtype=torch.float64, generator=self._generator("place", number, epoch))
                    if self.shuffle
                    else 0.5
                )
                places.append(spread / count)
        order = torch.argsort(torch.cat(places), stable=True)
        mixed: list[int] = torch.cat(rows)[order].tolist()
        return mixed

    def count(self, rows: Sequence[int]) -> list[int]:
        """Number of these rows in each data set."""
        bounds = torch.tensor(self._starts[1:])
        owners = torch.bucketize(torch.tensor(rows, dtype=torch.int64), bounds, right=True)
        found: list[int] = torch.bincount(owners, minlength=len(self.sizes)).tolist()
        return found

    def _rows_of(self, number: int, first: int, count: int) -> torch.Tensor:
        """Rows [first, first + count) of a data set that is repeated without end."""
        size = self.sizes[number]
        parts = []
        for turn in range(first // size, (first + count - 1) // size + 1):
            rows = (
                torch.randperm(size, generator=self._generator("rows", number, turn))
                if self.shuffle
                else torch.arange(size)
            )
            parts.append(rows[max(first - turn * size, 0) : first + count - turn * size])
        return torch.cat(parts) + self._starts[number]

    def _generator(self, what: str, number: int, turn: int) -> torch.Generator:
        """A generator seeded for one purpose, data set and pass or epoch."""
        return torch.Generator().manual_seed(zlib.crc32(f"{what} {self.seed} {number} {turn}".encode()))


class _MixedRows(ResumableSampler):
    """Rows of a mixture, distributed as by ``ResumableSampler``."""

    def __init__(self, mixture: Mixture, num_replicas: int | None, rank: int | None) -> None:
        self._mixture = mixture
        super().__init__(
            sum(mixture.counts),
            shuffle=mixture.shuffle,
            seed=mixture.seed,
            num_replicas=num_replicas,
            rank=rank,
        )

    def _rows(self) -> list[int]:
        return self._mixture.rows(self.epoch)

    def rows_left(self) -> list[int]:
        """Indices of the rows of the epoch that training has not consumed."""
        return self._rows()[self.position :]


class _MixedPacks(PackedSampler):
    """Packs of a mixture, distributed as by ``PackedSampler``."""

    def __init__(
        self,
        mixture: Mixture,
        lengths: list[int],
        num_targets: list[int] | None,
        max_length: int,
        cost: tuple[float, float] | None,
        num_replicas: int | None,
        rank: int | None,
    ) -> None:
        self._mixture = mixture
        super().__init__(
            lengths,
            max_length=max_length,
            num_targets=num_targets,
            shuffle=mixture.shuffle,
            seed=mixture.seed,
            num_replicas=num_replicas,
            rank=rank,
            cost=cost,
        )

    def _rows(self, epoch: int, generator: torch.Generator) -> list[int]:
        return self._mixture.rows(epoch)

    def _epoch_of_order(self) -> int:
        return self.epoch  # even without shuffling, since an epoch continues where the previous one ended

    def _rows_of_an_epoch(self) -> int:
        return sum(self._mixture.counts)

    def rows_left(self) -> list[int]:
        """Indices of the rows of the epoch that training has not consumed."""
        return [row for pack in self._order()[self._history[-1][1] :] for row in pack]


def _flat(name: str, values: Any, sizes: list[int]) -> list[int]:
    """One number for each row of all data sets, from one list or from a list for each data set."""
    nested = (
        isinstance(values, (list, tuple))
        and len(values) == len(sizes)
        and all(isinstance(part, (list, tuple, array)) or getattr(part, "ndim", 0) == 1 for part in values)
    )
    parts = [as_ints(f"{name}[{number}]", part) for number, part in enumerate(values)] if nested else []
    flat = [value for part in parts for value in part] if nested else as_ints(name, values)
    if len(flat) != sum(sizes) or (nested and [len(part) for part in parts] != sizes):
        got = [len(part) for part in parts] if nested else len(flat)
        raise ValueError(f"{name} has {got} entries, the data sets have {sizes} rows")
    return flat


def _rows_of_each(
    sizes: list[int],
    weights: Sequence[float] | None,
    counts: Sequence[int] | None,
    temperature: float | None,
    epoch_rows: int | None,
) -> list[int]:
    """Number of rows of each data set in an epoch; the arguments are those of ``MixedSampler``.

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
        wanted = as_ints("counts", counts)
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
        wanted = _apportioned(
            shares, check_count("epoch_rows", sum(sizes) if epoch_rows is None else epoch_rows)
        )
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

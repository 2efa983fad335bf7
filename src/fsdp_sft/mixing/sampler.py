"""Several data sets in one order, in the proportions that are asked for, with a position that resumes."""

import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from fsdp_sft.mixing.shares import rows_of_each
from fsdp_sft.packing.bins import as_ints, check_count
from fsdp_sft.packing.sampler import PackedSampler
from fsdp_sft.sampler import ResumableSampler, place_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MixedSampler(Sampler[Any]):
    """Deals rows of several data sets out to ranks, as indices into ``ConcatDataset(datasets)``.

    Every epoch has a fixed number of rows of each data set, spread evenly over it: any stretch of an epoch
    has the same proportions, to within a row or two. A data set of which an epoch has fewer rows than there
    are goes on with the others in the next epoch; one of which it has more is gone through again, each time
    in an order of its own. So after any number of epochs all rows of a data set have come equally often, or
    once more (and the rows that fill up an epoch's last round, where it does not divide by the ranks).

    With ``lengths`` and ``max_length`` it deals packs out, as ``PackedSampler`` does: for the
    ``batch_sampler`` of a DataLoader with ``PackedCollator``. Otherwise it is for ``sampler``. Position,
    epochs, ``windows`` and another number of ranks are as with ``ResumableSampler`` and ``PackedSampler``.

    Args:
        datasets: The data sets, or their numbers of rows.
        weights: How many rows of each an epoch has, relative to the others; any numbers from 0 on.
        counts: How many rows of each an epoch has.
        temperature: From 1 on: rows in proportion to ``len(dataset) ** (1 / temperature)``. 1 keeps the
            proportions of the data, larger ones raise the share of small data sets.
        epoch_rows: Rows of an epoch, with ``weights`` or ``temperature``; None is as many as there are in
            all. Without any of the four an epoch has every row once.
        lengths: Tokens of each row of all data sets, one after the other, or a list of those for each.
        max_length: Most tokens of a pack.
        num_targets: For packs: as for ``PackedSampler``, in the form of ``lengths``.
        cost: For packs: as for ``PackedSampler``.
        shuffle: Whether each time through a data set has an order of its own.
        seed: Of the order, together with the epoch; the same on all ranks.
        num_replicas: Number of ranks that share the rows; None takes the mesh's or the process group's, or 1.
        rank: This rank; None takes the mesh's or the process group's, or 0.
        mesh: The ranks that share the rows, in place of ``num_replicas`` and ``rank``.

    Raises:
        TypeError: If a number is none.
        ValueError: If an argument is out of range, contradicts another, or there are no rows.

    Memory: About 60 bytes a row of an epoch while its order is made, 8 (packs: 20) after that.

    Example:
        >>> sampler = MixedSampler([900, 100], weights=[1, 1], epoch_rows=400)
        >>> rows = list(sampler)
        >>> len(rows), sum(row >= 900 for row in rows)
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
            rows_of_each(sizes, weights, counts, temperature, epoch_rows),
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
        """Rows, or packs, that this rank has left in the current epoch."""
        return len(self._order)

    @property
    def counts(self) -> list[int]:
        """Rows of each data set in an epoch."""
        return list(self._mixture.counts)

    @property
    def rows_seen(self) -> list[int]:
        """Rows of each data set that training has consumed on all ranks since its start."""
        left = self._mixture.count(self._order.rows_left())
        own = zip(self._mixture.counts, left, strict=True)
        return [self.epoch * count + count - missing for count, missing in own]

    @property
    def epochs(self) -> list[float]:
        """How often each data set has been gone through."""
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
        """Rows, or packs, of the current epoch that all ranks together have consumed."""
        return self._order.position

    @property
    def is_passed_over(self) -> bool:
        """Whether the epoch that was set lies before the checkpoint."""
        return self._order.is_passed_over

    @property
    def num_replicas(self) -> int:
        """Number of ranks that share the rows."""
        return self._order.num_replicas

    @property
    def rank(self) -> int:
        """This rank among them."""
        return self._order.rank

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; see ``ResumableSampler.set_epoch``."""
        self._order.set_epoch(epoch)

    def mark_consumed(self, num: int) -> None:
        """Advance by ``num`` rows, or packs, of this rank, and as many on every other."""
        self._order.mark_consumed(num)

    def end_epoch(self) -> None:
        """Go on to the next epoch, if the current one has begun."""
        self._order.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank: the position, and what the order depends on."""
        mixture = self._mixture
        return {**self._order.state_dict(), "sizes": mixture.sizes, "counts": mixture.counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, at this or another number of ranks.

        Raises:
            ValueError: If the state is of other data or another order: the rows seen would not be the same.
        """
        for key, own in (("sizes", self._mixture.sizes), ("counts", self._mixture.counts)):
            if list(state.get(key, ())) != own:
                raise ValueError(
                    f"sampler state has {key}={state.get(key)}, this sampler {own}: the order would differ; "
                    "use the same data sets and proportions, or start a new run"
                )
        self._order.load_state_dict(state)


class Mixture:
    """The rows of each epoch, in their order.

    Args:
        sizes: Rows of each data set.
        counts: Rows of each that an epoch has.
        shuffle: Whether each time through a data set has an order of its own.
        seed: Of the order.
    """

    def __init__(self, sizes: list[int], counts: list[int], *, shuffle: bool, seed: int) -> None:
        self.sizes, self.counts, self.shuffle, self.seed = sizes, counts, shuffle, seed
        self._starts = [0, *accumulate(sizes)]

    def rows(self, epoch: int) -> list[int]:
        """Indices into the data sets one after the other."""
        rows, places = [], []
        for number, count in enumerate(self.counts):
            if count:
                rows.append(self._rows_of(number, epoch * count, count))
                spread = torch.arange(count, dtype=torch.float64)
                # Each at random within its own part of the epoch: as even as can be, and in no pattern.
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
        """How many of these rows each data set has."""
        bounds = torch.tensor(self._starts[1:])
        owners = torch.bucketize(torch.tensor(rows, dtype=torch.int64), bounds, right=True)
        found: list[int] = torch.bincount(owners, minlength=len(self.sizes)).tolist()
        return found

    def _rows_of(self, number: int, first: int, count: int) -> torch.Tensor:
        """``count`` rows, from the ``first`` on, of a data set that is gone through again and again."""
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
        return torch.Generator().manual_seed(zlib.crc32(f"{what} {self.seed} {number} {turn}".encode()))


class _MixedRows(ResumableSampler):
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
        """Rows of the epoch that training has not consumed."""
        return self._rows()[self.position :]


class _MixedPacks(PackedSampler):
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
        return self.epoch  # also without shuffling an epoch goes on where the one before has ended

    def _rows_of_an_epoch(self) -> int:
        return sum(self._mixture.counts)

    def rows_left(self) -> list[int]:
        """Rows of the epoch that training has not consumed."""
        return [row for pack in self._order()[self._history[-1][1] :] for row in pack]


def _flat(name: str, values: Any, sizes: list[int]) -> list[int]:
    """One number for each row of all data sets."""
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

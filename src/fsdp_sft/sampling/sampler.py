"""An order of rows, of one data set or several, that resumes exactly where training stopped, on any ranks."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Sampler

from fsdp_sft._process.callers import warn_caller
from fsdp_sft._ranks.agree import this_rank, world_size
from fsdp_sft._ranks.mesh import data_parallel_place, mesh_of_job
from fsdp_sft.collate.options import check_count

T = TypeVar("T")


def place_of(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """(number of ranks that share the rows, this rank); None takes the mesh's or the job's.

    Raises:
        ValueError: If the rank is out of range, or ``mesh_of_job`` cannot tell.
    """
    if num_replicas is None or rank is None:
        mesh = mesh_of_job()
        own, shares = (this_rank(), world_size()) if mesh is None else data_parallel_place(mesh)
        num_replicas, rank = num_replicas or shares, own if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank must be in [0, {num_replicas}), got {rank}")
    return num_replicas, rank


class Placed(ABC):
    """Base of samplers and streams that keep a position: rank, epochs, what a state must have.

    The rank is looked up on each use, so an object made before ``init_distributed`` gets that of the process
    group.

    Args:
        num_replicas: Number of ranks that share the rows; None takes the mesh's, the process group's, or 1.
        rank: This rank; None takes the mesh's or the process group's, or 0.
        mesh: Mesh whose ranks share the rows, instead of both; those along ``cp`` get the same rows. None
            takes the one that ``build_mesh`` has made.
    """

    def __init__(self, num_replicas: int | None, rank: int | None, mesh: DeviceMesh | None = None) -> None:
        if mesh is not None:
            if num_replicas is not None or rank is not None:
                raise ValueError("give mesh, or num_replicas and rank, not both: a mesh determines them")
            mesh_of_job(mesh)
            rank, num_replicas = data_parallel_place(mesh)
        self._given_place = num_replicas, rank
        place_of(*self._given_place)  # raises for a rank that is out of range
        self.epoch = self.position = self._restored_epoch = 0
        self._drawn = 0  # rows or packs drawn since ``mark_consumed``
        self.is_passed_over = False

    def __getstate__(self) -> dict[str, Any]:
        """The attributes, with this rank's place, since a spawned worker has no process group."""
        place = place_of(*self._given_place) if world_size() > 1 else self._given_place
        return {**self.__dict__, "_given_place": place}

    @property
    def num_replicas(self) -> int:
        """Number of ranks that share the rows."""
        return place_of(*self._given_place)[0]

    @property
    def rank(self) -> int:
        """Index of this rank among those that share the rows."""
        return place_of(*self._given_place)[1]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless it is the current one: a resumed loop may call this.

        An epoch before the one that ``load_state_dict`` has restored is already trained: it is passed over,
        with a warning, and has no rows. So a resumed loop over ``range(num_epochs)`` may count from 0 or from
        the restored epoch.
        """
        self.is_passed_over = epoch < self._restored_epoch
        if self.is_passed_over:
            warn_caller(
                f"epoch {epoch} was trained before the checkpoint, which is in epoch {self.epoch}: it is "
                "passed over. To train it again, make a new sampler or stream"
            )
        elif epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def end_epoch(self) -> None:
        """Go to the next epoch if any of the current one has been consumed."""
        self._drawn = 0  # a tail that the loader drops was drawn too
        if self.position and not self.is_passed_over:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position, and what the order depends on; the same on every rank.

        Rows that were drawn and never marked as consumed cause a warning: a resumed run would repeat them.
        """
        if self._drawn:
            warn_caller(
                f"{self._drawn} draws of {type(self).__name__} were not marked as consumed, so its state is "
                "the position before them: iterate with windows(loader) over the DataLoader itself, or call "
                "mark_consumed"
            )
        return {"epoch": self.epoch, "position": self.position, **self._depends_on()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, with the same or another number of ranks.

        The rows themselves are not checked, which must be the same in the same order.

        Raises:
            ValueError: If the state belongs to other data or another order, so that other rows would be left.
        """
        here = self._depends_on()
        for key in (*here, "sizes", "counts", "max_length"):  # those of every kind of order
            if state.get(key) != here.get(key):
                raise ValueError(
                    f"the state has {key}={state.get(key)}, and here it is {here.get(key)}: the order would "
                    "differ; use the same data and options, and the same kind of sampler, or start a new run"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._restored_epoch, self._drawn, self.is_passed_over = self.epoch, 0, False

    def mark_consumed(self, number: int) -> None:
        """Advance the position by ``number`` rows or packs on this rank and on every other."""
        self._drawn = 0
        self.position += number * self.num_replicas

    @abstractmethod
    def _depends_on(self) -> dict[str, Any]:
        """What the order depends on, with options as they are now: a state must have the same."""


class Mixture:
    """The rows of several data sets in one order, as indices into ``ConcatDataset(datasets)``.

    A sampler deals them out: ``ResumableSampler(mixture)`` rows, ``PackedSampler(lengths, mixture=mixture)``
    packs. Every epoch has a fixed number of rows of each data set, spread evenly over it: any section of an
    epoch has the same proportions, to within a row or two (of 100 data sets, ten). If an epoch has fewer
    rows of a data set than there are, the next epoch continues with the remaining ones. If it has more, the
    data set is repeated, each time in a new order. So after any number of epochs some rows of a data set
    have come at most once more than the others.

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
        return torch.cat(rows)[torch.argsort(torch.cat(places), stable=True)].tolist()

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


class OrderedSampler(Placed, Sampler[T]):
    """Base of samplers that deal the items of an epoch's order, rows or packs, to any number of ranks.

    The order is a function of the epoch, and each *round* of it gives every rank one item. The position
    counts the items of the rounds that all ranks have consumed.

    Args:
        num_rows: Number of rows of the data.
        mixture: Rows of an epoch, of several data sets; None takes every row once.
        shuffle: Whether each epoch has an order of its own.
        seed: Seed of the order, together with the epoch.
        **place: Arguments of ``Placed``.
    """

    def __init__(
        self, num_rows: int, mixture: Mixture | None, shuffle: bool, seed: int, **place: Any
    ) -> None:
        super().__init__(**place)
        self.num_rows = check_count("the number of rows", num_rows)
        self._mixture, self.shuffle, self.seed = mixture, shuffle, seed

    def __iter__(self) -> Iterator[T]:
        if self.is_passed_over:
            return
        order, first, (ranks, rank) = self._order(), self.position, place_of(*self._given_place)
        for start in range(first, first + self._rounds_left() * ranks, ranks):
            self._drawn += 1
            yield self._dealt(order, start, ranks, rank)

    def __len__(self) -> int:
        """Number of rows or packs that this rank has left in the current epoch."""
        return 0 if self.is_passed_over else self._rounds_left()

    def mark_consumed(self, number: int) -> None:
        """Advance the position by ``number`` rows or packs on this rank and on every other."""
        left = self._rounds_left()
        super().mark_consumed(number)
        if number >= left:
            self.end_epoch()

    def _depends_on(self) -> dict[str, Any]:
        own = {"num_rows": self.num_rows, "seed": int(self.seed), "shuffle": int(self.shuffle)}
        of = self._mixture
        return own if of is None else {**own, "sizes": of.sizes, "counts": of.counts}

    def _mixed_rows(self, epoch: int) -> tuple[list[int], torch.Generator]:
        """The rows of an epoch, those of a mixture or all in random order, and the epoch's generator."""
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * epoch)
        if self._mixture is not None:
            return self._mixture.rows(epoch, seed=self.seed, shuffle=self.shuffle), generator
        return torch.randperm(self.num_rows, generator=generator).tolist(), generator

    @abstractmethod
    def _order(self) -> list[T]:
        """The items of the epoch, for all ranks."""

    @abstractmethod
    def _dealt(self, order: list[T], start: int, ranks: int, rank: int) -> T:
        """What a rank gets of the round that begins at ``start``."""

    def _rounds_left(self) -> int:
        """Number of rounds from the position to the end of the epoch."""
        return max(-(-(len(self._order()) - self.position) // self.num_replicas), 0)


class ResumableSampler(OrderedSampler[int]):
    """Like torch's ``DistributedSampler``, but with a position that checkpoints save.

    The position counts the rows that training has consumed on all ranks, not those that a DataLoader's
    workers have fetched ahead. ``windows`` reports them; a loop without it calls ``mark_consumed`` itself.
    Row ``k`` of the epoch's order goes to rank ``k % num_replicas``, so the position is valid for any number
    of ranks; the last round is filled up with the first rows of the order. When an epoch has been consumed,
    the next one begins by itself. With ``batch_size=None``, where each index of the data set gives a whole
    batch, a batch counts as one row.

    Args:
        data: The data set, or its number of rows; or a ``Mixture`` of several.
        shuffle: Whether each epoch has a new random order; if not, rows come in the data's order.
        seed: Seed of the order, together with the epoch; the same on all ranks.
        num_replicas: Number of ranks that share the rows; None takes the mesh's or the process group's, or 1.
        rank: This rank; None takes the mesh's or the process group's, or 0.
        mesh: Mesh from ``build_mesh``, instead of ``num_replicas`` and ``rank``; ranks along ``cp`` get the
            same rows. None takes the only one there is.

    Raises:
        TypeError: If ``data`` is neither rows nor a number.
        ValueError: If there are no rows.

    Example:
        >>> sampler = fs.ResumableSampler(rows, num_replicas=2, rank=0)
        >>> sampler.mark_consumed(3)
        >>> resumed = fs.ResumableSampler(rows, num_replicas=4, rank=0)
        >>> resumed.load_state_dict(sampler.state_dict())
        >>> resumed.position, len(resumed)
        (6, 1)
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if isinstance(data, str) or not isinstance(data, (int, Sized)):
            raise TypeError(f"data must be the rows, or their number, got {type(data).__name__}")
        mixture = data if isinstance(data, Mixture) else None
        number = data if isinstance(data, int) else len(data)
        super().__init__(number, mixture, shuffle, seed, num_replicas=num_replicas, rank=rank, mesh=mesh)

    def _order(self) -> list[int]:
        if self._mixture is None and not self.shuffle:
            return list(range(self.num_rows))
        return self._mixed_rows(self.epoch)[0]

    def _dealt(self, order: list[int], start: int, ranks: int, rank: int) -> int:
        return order[(start + rank) % len(order)]  # the first rows fill the last round

    def _rounds_left(self) -> int:
        return max(-(-(self.num_rows - self.position) // self.num_replicas), 0)

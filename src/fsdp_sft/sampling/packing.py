"""Packs dealt to ranks, of rows whose lengths are known and of a stream, and resumed on any number of ranks.

A *row* is one conversation, a *pack* several rows joined into one sequence, and a *round* one pack for each
rank. Tokens of a row must not attend to other rows of their pack. This depends on the model, and
``verify_packing`` measures it.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fsdp_sft._compat import data
from fsdp_sft.collate.options import check_count
from fsdp_sft.metrics.throughput import model_flops_per_token
from fsdp_sft.sampling.bins import as_ints, check_lengths, deal, pack_lengths
from fsdp_sft.sampling.collator import Row, row_sizes
from fsdp_sft.sampling.sampler import Mixture, OrderedSampler, Placed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Rounds whose packs are sorted together. More balance better, but make the packs of a round more alike.
_POOL_ROUNDS = 32
# Longer than every window and chunk of attention: beyond it only full attention costs more per token.
_LONG = 1 << 22
_LEVELS = 16  # packs whose tokens differ by less than 1/16 of max_length count as equally long


class PackedSampler(OrderedSampler[list[int]]):
    """Distributes packs of rows to ranks; for the ``batch_sampler`` of a DataLoader with ``PackedCollator``.

    Every epoch packs all rows in a new order. A *round* gives every rank one pack. The packs of a round
    have similar numbers of tokens and of targets, so that ranks wait little for each other, and rounds come
    in random order. Every row is in exactly one pack of the epoch. In the last round packs are split so that
    every rank has one; if rows run out, ranks get an empty pack, of which ``PackedCollator`` makes a batch
    without targets.

    The position counts packs that training has consumed on all ranks, not those that a DataLoader's workers
    have fetched ahead. ``windows`` reports them; a loop without it calls ``mark_consumed``. The rounds of an
    epoch are arranged for the number of ranks with which it begins. If that changes in its middle, the rest
    of the same packs is dealt to the new number, and balanced again from the next epoch on.

    Args:
        lengths: Tokens of each row of the data set; see ``row_sizes``.
        max_length: Most tokens of a pack.
        num_targets: Targets of each row, after the shift; None balances tokens only.
        shuffle: Whether each epoch has new packs and a new order; if not, all have those of the first.
        seed: Seed of packs and order, together with the epoch; the same on all ranks.
        num_replicas: Number of ranks that share the rows; None takes the mesh's or the process group's, or 1.
        rank: This rank; None takes the mesh's or the process group's, or 0.
        mesh: Mesh from ``build_mesh``, instead of ``num_replicas`` and ``rank``; ranks along ``cp`` get the
            same packs. None takes the only one there is.
        cost: Coefficients ``(a, b)``, such as ``attention_cost(config)``. Packs of a round then have similar
            ``a * tokens + b * sum(length ** 2)`` instead of similar numbers of tokens and targets. This
            matters with long rows: without it, ranks wait for the one whose pack is a single row.
        mixture: Rows of an epoch, of several data sets; ``lengths`` and ``num_targets`` are then those of all
            their rows, in order. None takes every row once.

    Raises:
        TypeError: If a length or number of targets is no integer.
        ValueError: If there are no rows, one does not fit, or an argument is out of range.

    Memory: About 150 bytes a row while an epoch's packs are made, 20 after that.

    Example:
        >>> lengths, num_targets = fs.row_sizes(dataset)
        >>> sampler = fs.PackedSampler(lengths, num_targets=num_targets, max_length=128)
        >>> sorted(row for pack in sampler for row in pack)
        [0, 1, 2, 3, 4, 5, 6, 7]
        >>> loader = torch.utils.data.DataLoader(
        ...     dataset, batch_sampler=sampler, collate_fn=fs.PackedCollator(max_length=128)
        ... )
    """

    def __init__(
        self,
        lengths: Any,
        *,
        max_length: int,
        num_targets: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: DeviceMesh | None = None,
        cost: tuple[float, float] | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        self._lengths = check_lengths(lengths, max_length)
        number = len(self._lengths)
        super().__init__(number, mixture, shuffle, seed, num_replicas=num_replicas, rank=rank, mesh=mesh)
        self._targets = self._lengths if num_targets is None else as_ints(num_targets)
        if len(self._targets) != number:
            raise ValueError(
                f"num_targets has {len(self._targets)} entries, lengths {number}; row_sizes returns both"
            )
        if mixture is not None and sum(mixture.sizes) != number:
            raise ValueError(f"lengths has {number} entries, the data sets have {mixture.sizes} rows")
        self.max_length = max_length
        self._cost = None if cost is None else (float(cost[0]), float(cost[1]))
        self._ranks = self.num_replicas  # with which the epoch has begun
        self._packs: tuple[tuple[int, ...], list[list[int]]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position, and what the order depends on; the same on every rank."""
        return {**super().state_dict(), "ranks": self._ranks if self.position else self.num_replicas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, with the same or another number of ranks."""
        super().load_state_dict(state)
        self._ranks = int(state["ranks"])

    def _depends_on(self) -> dict[str, Any]:
        return {
            **super()._depends_on(),
            "max_length": self.max_length,
            "cost": None if self._cost is None else list(self._cost),
            "rows_crc32": zlib.crc32(self._targets.tobytes(), zlib.crc32(self._lengths.tobytes())),
        }

    def _dealt(self, order: list[list[int]], start: int, ranks: int, rank: int) -> list[int]:
        # A round's packs are roughly sorted by size; ranks take turns, so that none gets all large ones.
        return deal(order[start : start + ranks], self._weight, ranks)[(rank + start // ranks) % ranks]

    def _order(self) -> list[list[int]]:
        if not self.position:
            self._ranks = self.num_replicas
        # An epoch of a mixture continues where the previous one ended, even without shuffling.
        epoch = self.epoch if self.shuffle or self._mixture is not None else 0
        key = epoch, self._ranks, self.seed, self.shuffle
        if self._packs is None or self._packs[0] != key:
            rows, generator = self._mixed_rows(epoch)
            packs = pack_lengths([self._lengths[row] for row in rows], self.max_length)
            packs = [[rows[i] for i in pack] for pack in _shuffled(packs, generator)]
            self._packs = key, self._balanced(packs, self._ranks, generator)
        return self._packs[1]

    def _weight(self, row: int) -> float:
        """Weight of a row when the packs of a short round are split."""
        length = self._lengths[row]
        per_token, per_square = self._cost or (1, 0)
        return per_token * length + per_square * length * length

    def _balanced(self, packs: list[list[int]], ranks: int, generator: torch.Generator) -> list[list[int]]:
        """Arrange packs in rounds of similar ones; rounds come in random order, a short one last."""
        whole = len(packs) // ranks * ranks
        # A short last round gets the packs with the most rows, since they are split.
        by_rows = sorted(range(len(packs)), key=lambda i: min(len(packs[i]), ranks))
        last = [packs[i] for i in by_rows[whole:]]
        packs = [packs[i] for i in sorted(by_rows[:whole])]
        rounds: list[list[list[int]]] = []
        # Costs differ by far more than tokens, of which most packs have equally many: all packs are one pool.
        size = ranks * _POOL_ROUNDS if self._cost is None else max(whole, 1)
        for start in range(0, whole, size):
            pool = sorted(packs[start : start + size], key=self._size)
            rounds += [pool[i : i + ranks] for i in range(0, len(pool), ranks)]
        return [pack for one in _shuffled(rounds, generator) for pack in one] + last

    def _size(self, pack: list[int]) -> tuple[float, int]:
        """Key by which packs of a round are alike: cost, or free room in ``_LEVELS`` steps, then targets."""
        if self._cost is not None:
            return sum(map(self._weight, pack)), 0
        free = self.max_length - sum(self._lengths[row] for row in pack)
        return free * _LEVELS // self.max_length, sum(self._targets[row] for row in pack)


def _shuffled(items: list[Any], generator: torch.Generator) -> list[Any]:
    """The items in random order."""
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]


def attention_cost(config: "PreTrainedConfig") -> tuple[float, float]:
    """Coefficients ``(a, b)`` of a pack's cost, ``a * tokens + b * sum(length ** 2)``, for ``PackedSampler``.

    They are training FLOPs, counted as by ``model_flops_per_token`` except that a token attends only to those
    before it, half of its row on average. Layers with a sliding window or chunks count as if every row were
    longer than the window. They are for attention within each row (``use_varlen_attention``, flash
    attention): where scores of the whole pack are computed, as by "sdpa", packs of equally many tokens cost
    the same, and ``PackedSampler`` needs no ``cost``.

    Args:
        config: A transformers config of a decoder-only model.

    Returns:
        (FLOPs per token, FLOPs per squared token).

    Raises:
        ValueError: For a family whose FLOPs ``model_flops_per_token`` does not count; give ``cost`` as
            (6 * parameters a token passes through, 6 * heads * head_dim * layers).

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=256, intermediate_size=688)
        >>> a, b = fs.attention_cost(config)
        >>> b
        3072.0
        >>> sampler = fs.PackedSampler([4096] + [64] * 99, max_length=4096, cost=(a, b))
    """
    near, far = (model_flops_per_token(config, length) for length in (_LONG, 2 * _LONG))
    growth = (far - near) / _LONG
    return near - growth * _LONG, growth / 2


class PackedStream(Placed, IterableDataset[list[Row]]):
    """Packs a stream of rows; for a DataLoader with ``batch_size=None`` and ``PackedCollator``.

    ``buffer_size`` rows at a time are packed by best fit decreasing. Pack ``k`` of the stream goes to rank
    ``k % num_replicas``. At the end packs are split so that every rank has equally many; if rows run out,
    ranks get an empty pack, of which ``PackedCollator`` makes a batch without targets. No row is lost or
    repeated.

    Every rank reads the whole stream, so rows must come in the same order everywhere. If each rank has a
    different stream, pass ``num_replicas=1, rank=0``; ``windows`` then ends the epoch with the shortest
    stream, and the state is that of one rank. Rows are packed in the consuming process, which alone knows
    what has been consumed; to tokenise in the background, let ``rows`` be a DataLoader with workers and
    ``batch_size=None``.

    The position counts packs that training has consumed on all ranks, as in ``PackedSampler``. A resumed
    stream reads past the rows of consumed packs; ``skip`` of a Hugging Face ``IterableDataset`` is not used,
    as it fixes the order of the files. A stream that was consumed to its end begins its next epoch.

    Args:
        rows: An iterable, read lazily and again for each epoch, of rows with ``input_ids`` and ``labels`` or
            ``EncodedChat``s. A generator cannot be read again: give an object whose ``__iter__`` makes one.
        max_length: Most tokens of a pack.
        buffer_size: Number of rows packed together. More rows fill packs better; 1000 fill them to about
            99 %.
        num_replicas: Number of ranks that share the packs; None takes the mesh's, the process group's, or 1.
        rank: This rank; None takes the mesh's or the process group's, or 0.
        mesh: Mesh from ``build_mesh``, instead of ``num_replicas`` and ``rank``; ranks along ``cp`` get the
            same packs. None takes the only one there is.

    Raises:
        TypeError: If the rows are an iterator, such as a generator.
        ValueError: If an argument is out of range; while reading, for a malformed row or one that is too
            long, with its index in the stream.
        RuntimeError: If it is read in a worker of a DataLoader.

    Memory: ``buffer_size`` rows.

    Example:
        >>> stream = fs.PackedStream(dataset, max_length=128)
        >>> sum(len(pack) for pack in stream)
        8
        >>> loader = torch.utils.data.DataLoader(
        ...     stream, batch_size=None, collate_fn=fs.PackedCollator(max_length=128)
        ... )
    """

    def __init__(
        self,
        rows: Iterable[Row],
        *,
        max_length: int,
        buffer_size: int = 1000,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(num_replicas, rank, mesh)
        if isinstance(rows, Iterator):
            raise TypeError(
                "the rows of a stream are read again in each epoch and after a resume, and a "
                f"{type(rows).__name__} is empty by then: give an object whose __iter__ makes a new one, "
                "such as datasets.IterableDataset.from_generator(function)"
            )
        self.rows = rows
        self.max_length = check_count("max_length", max_length)
        self.buffer_size = check_count("buffer_size", buffer_size)

    def __iter__(self) -> Iterator[list[Row]]:
        if get_worker_info() is not None:
            raise RuntimeError(
                "PackedStream packs in the consuming process: use num_workers=0 here, and for tokenising in "
                "the background PackedStream(DataLoader(rows, batch_size=None, num_workers=...), ...)"
            )
        shares = data.shares_of_stream(getattr(self.rows, "dataset", self.rows))
        if shares > 1 and self.num_replicas > 1:
            raise ValueError(
                f"the rows are one of {shares} shares already (split_dataset_by_node), and each of "
                f"{self.num_replicas} ranks would take a share of that share: rows would be lost. Give "
                "PackedStream the whole stream, or num_replicas=1, rank=0"
            )
        if self.is_passed_over:
            return
        packs, has_rounds = islice(self._all_packs(), self.position, None), False
        while some := list(islice(packs, self.num_replicas)):
            has_rounds = True
            self._drawn += 1
            yield deal(some, lambda row: row_sizes([row])[0][0], self.num_replicas)[self.rank]
        if not has_rounds and self.position:  # it was consumed to its end
            self.end_epoch()
            yield from self

    def _depends_on(self) -> dict[str, Any]:
        return {"max_length": self.max_length, "buffer_size": self.buffer_size}

    def _all_packs(self) -> Iterator[list[Row]]:
        """Packs of the epoch, those of consumed buffers too: reading their rows takes far longer."""
        stream = self.rows
        ordered: Any = stream if hasattr(stream, "set_epoch") else getattr(stream, "dataset", None)
        if hasattr(ordered, "set_epoch"):
            ordered.set_epoch(self.epoch)
            if isinstance(stream, DataLoader):
                data.end_persistent_workers(stream)
        source, number = iter(stream), 0
        while buffer := list(islice(source, self.buffer_size)):
            try:
                packs = pack_lengths(row_sizes(buffer)[0], self.max_length)
            except ValueError as error:
                error.add_note(f"rows are counted from row {number} of the stream")
                raise
            number += len(buffer)
            for pack in packs:
                yield [buffer[row] for row in pack]

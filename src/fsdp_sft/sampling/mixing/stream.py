"""Several streams as one, in given proportions."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, Literal

import torch
from torch.utils.data import get_worker_info

from fsdp_sft.sampling.mixing.shares import as_share
from fsdp_sft.sampling.packing.stream import rows_from

# floor(2^64 / golden ratio): any number of its multiples, modulo 2^64, is spread evenly over the range, which
# is divided among the streams in proportion to their weights. Row k of the epoch comes from the stream in
# whose part k * _STEP + offset lies, so the owner of a row is known without the rows before it.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_AT_ONCE = 1 << 20


class MixedStream:
    """Rows of several streams, mixed in proportion to their weights.

    The stream from which a row comes depends only on the weights, the seed, the epoch and the number of rows
    before it. Any section of an epoch has the given proportions, to within a few rows, and a position is a
    single number.

    Pass it as ``rows`` to ``PackedStream``, which distributes packs to ranks and keeps the position. It is no
    ``Dataset``: a DataLoader over it would give every rank the same rows. To tokenise in the background, let
    each stream be a DataLoader with workers and ``batch_size=None``.

    Args:
        streams: Iterables of rows that can be read again; they are read lazily. If a stream has
            ``set_epoch``, each reading calls it with a different number.
        weights: Rows of each stream, relative to the others; 0 leaves a stream out. None weighs all equally.
        stop: "all" ends an epoch when every stream has been read to its end; until then, a stream that ends
            starts again. "first" ends the epoch when one stream ends.
        seed: Seed of the order, together with the epoch; the same on all ranks.

    Raises:
        TypeError: If a weight is no number, or a stream can be read only once.
        ValueError: If an argument is out of range; while reading, for a stream without rows.
        RuntimeError: If it is read in one of several workers of a DataLoader, where each would give all rows.

    Memory: What the streams hold, and one row of each.
    Source: Multiples of the golden ratio: D. E. Knuth, The Art of Computer Programming, volume 3, 6.4.

    Example:
        >>> mixed = fs.MixedStream([dataset[:6], dataset[6:]], weights=[3, 1])
        >>> mixed.counts(100)
        [75, 25]
        >>> stream = fs.PackedStream(mixed, max_length=128)
    """

    def __init__(
        self,
        streams: Sequence[Iterable[Any]],
        *,
        weights: Sequence[float] | None = None,
        stop: Literal["all", "first"] = "all",
        seed: int = 0,
    ) -> None:
        self.streams = list(streams)
        given = [1.0] * len(self.streams) if weights is None else weights
        self.weights = [as_share("weights", weight) for weight in given]
        if len(self.weights) != len(self.streams) or not any(self.weights):
            raise ValueError(
                f"weights must be a number for each of the {len(self.streams)} streams, one of them above 0; "
                f"got {weights}"
            )
        for number, stream in enumerate(self.streams):
            if isinstance(stream, Iterator) or not isinstance(stream, Iterable):
                raise TypeError(
                    f"stream {number} is a {type(stream).__name__}, and must be something that can be read "
                    "again and again: a list, a data set, or an object whose __iter__ begins anew"
                )
        if stop not in ("all", "first"):
            raise ValueError(f"stop must be 'all' or 'first', got {stop!r}")
        self.stop, self.seed, self.epoch = stop, seed, 0
        self._used = [number for number, weight in enumerate(self.weights) if weight]
        shares = [self.weights[number] / sum(self.weights) for number in self._used]
        # Where each stream's part of the int64 range begins, except for the first stream's.
        self._bounds = torch.tensor(
            [round(end * (1 << 64)) - (1 << 63) for end in accumulate(shares[:-1])], dtype=torch.int64
        )

    @property
    def order(self) -> dict[str, Any]:
        """What the order depends on; ``PackedStream`` saves it with its position."""
        return {"weights": self.weights, "stop": self.stop, "seed": self.seed}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is read next; it has another order, and so may its streams."""
        self.epoch = epoch

    def counts(self, num_rows: int) -> list[int]:
        """Number of rows from each stream among the first ``num_rows`` rows of the epoch."""
        found = torch.zeros(len(self.streams), dtype=torch.int64)
        for start in range(0, num_rows, _AT_ONCE):
            owners = self._owners(start, min(_AT_ONCE, num_rows - start))
            found += torch.bincount(owners, minlength=len(self.streams))
        counts: list[int] = found.tolist()
        return counts

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise RuntimeError(
                f"MixedStream is read in one of {worker.num_workers} workers, and each would give all rows: "
                "let each stream be a DataLoader with workers and batch_size=None instead"
            )
        readers = {number: _Turns(self.streams[number], number, self.epoch) for number in self._used}
        return self._rows(readers)

    def _rows(self, readers: dict[int, "_Turns"]) -> Iterator[Any]:
        """Rows, each from the stream whose turn it is."""
        start, number = 0, 64
        while True:
            for owner in self._owners(start, number).tolist():
                reader = readers[owner]
                if reader.at_end():
                    if self.stop == "first" or all(other.was_at_end() for other in readers.values()):
                        return
                    reader.begin_again()
                yield reader.take()
            start, number = start + number, min(2 * number, _AT_ONCE)

    def _owners(self, start: int, number: int) -> torch.Tensor:
        """Index of each row's stream, int64 ``(number,)``, for rows from ``start`` of the epoch on."""
        digest = hashlib.blake2b(f"{self.seed} {self.epoch}".encode(), digest_size=8).digest()
        places = torch.arange(start, start + number) * _STEP + int.from_bytes(digest, "big", signed=True)
        return torch.tensor(self._used)[torch.bucketize(places, self._bounds, right=True)]


class _Turns:
    """One of the streams, with a look ahead at the next row and a restart at the end.

    Args:
        stream: The stream.
        number: Index of the stream, for messages.
        epoch: The epoch of the mixture.
    """

    def __init__(self, stream: Iterable[Any], number: int, epoch: int) -> None:
        self._stream, self._number, self._epoch = stream, number, epoch
        self._turn = 0
        self._next: list[Any] = []
        self._rows: Iterator[Any] = iter(())
        self._begin()
        if self.at_end():
            raise ValueError(f"stream {number} has no rows")

    def at_end(self) -> bool:
        """Whether this reading of the stream has no row left."""
        if not self._next:
            self._next = list(islice(self._rows, 1))
        return not self._next

    def was_at_end(self) -> bool:
        """Whether the stream has been read to its end, in this reading or an earlier one."""
        return self._turn > 0 or self.at_end()

    def take(self) -> Any:
        """The next row, which `at_end` has fetched."""
        return self._next.pop()

    def begin_again(self) -> None:
        """Restart the stream."""
        self._turn += 1
        self._begin()
        if self.at_end():
            raise ValueError(f"stream {self._number} has no rows when it is read again")

    def _begin(self) -> None:
        self._rows = rows_from(self._stream, epoch=self._epoch + (self._turn << 32))

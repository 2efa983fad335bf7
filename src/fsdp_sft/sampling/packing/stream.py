"""Pack the rows of a stream, with a bounded buffer."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fsdp_sft._compat import data
from fsdp_sft.collate.options import check_count
from fsdp_sft.sampling.packing.bins import deal, pack_lengths
from fsdp_sft.sampling.packing.collator import Row, row_sizes
from fsdp_sft.sampling.sampler import Placed


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
        has_rounds = False
        for packs in self._rounds():
            has_rounds = True
            self._drawn += 1
            yield packs[self.rank]
        if not has_rounds and self.position:  # it was consumed to its end
            self.end_epoch()
            yield from self

    def _depends_on(self) -> dict[str, Any]:
        return {"max_length": self.max_length, "buffer_size": self.buffer_size}

    def _rounds(self) -> Iterator[list[list[Row]]]:
        """Rounds from the position on; packs of a short last one are split."""
        packs = itertools.islice(self._all_packs(), self.position, None)
        while some := list(itertools.islice(packs, self.num_replicas)):
            yield deal(some, lambda row: row_sizes([row])[0][0], self.num_replicas)

    def _all_packs(self) -> Iterator[list[Row]]:
        """Packs of the epoch, those of consumed buffers too: reading their rows takes far longer."""
        stream = self.rows
        ordered: Any = stream if hasattr(stream, "set_epoch") else getattr(stream, "dataset", None)
        if hasattr(ordered, "set_epoch"):
            ordered.set_epoch(self.epoch)
            if isinstance(stream, DataLoader):
                data.end_persistent_workers(stream)
        source, number = iter(stream), 0
        while buffer := list(itertools.islice(source, self.buffer_size)):
            try:
                packs = pack_lengths(row_sizes(buffer)[0], self.max_length)
            except ValueError as error:
                error.add_note(f"rows are counted from row {number} of the stream")
                raise
            number += len(buffer)
            for pack in packs:
                yield [buffer[row] for row in pack]

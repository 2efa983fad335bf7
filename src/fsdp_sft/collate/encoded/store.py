"""The files of encoded rows, and the sequence of rows that reads them.

The labels of a row equal its ids within a few runs of tokens and are -100 outside, so the files hold the
runs' edges and not the labels:

- ``ids.i32``: token ids of all rows, one row after the other
- ``edges.i32``: begin and end of each run, as token indices within its row
- ``weights.f32``: loss weight of each run; missing if all are 1
- ``lengths.i32``, ``targets.i32``, ``runs.i32``: numbers of tokens, targets and runs of each row
- ``id_begins.i64``, ``run_begins.i64``: index of each row's first id and first run; one entry more than rows
- ``about.json``: counts, and the size of each file; written last
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, overload

import torch

from fsdp_sft._process.bounds import MAX_JSON_BYTES, parse_json
from fsdp_sft._process.codec import MALFORMED
from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.disk import read_bytes, sync_file, sync_folder, write_bytes
from fsdp_sft._tensors.safetensors import open_file
from fsdp_sft.collate import EncodedChat, FilterCounts
from fsdp_sft.collate.rows import check_encoded
from fsdp_sft.errors import CheckpointCorruptError, CheckpointFormatError
from fsdp_sft.targets import IGNORE_INDEX

_COLUMNS = {
    "ids.i32": "i",
    "edges.i32": "i",
    "weights.f32": "f",
    "lengths.i32": "i",
    "targets.i32": "i",
    "runs.i32": "i",
}
_BEGINS = {"id_begins.i64": "lengths.i32", "run_begins.i64": "runs.i32"}
_ABOUT = "about.json"
_FLUSH_TOKENS = 1 << 20
_ANEW = "delete the folder, and encode the rows anew"


class RowWriter:
    """Appends rows to the files of a new folder.

    Args:
        folder: Folder to make; it must not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._buffers: dict[str, array[Any]] = {name: array(code) for name, code in _COLUMNS.items()}

    def add(self, chat: EncodedChat) -> None:
        """Append a row.

        Raises:
            ValueError: If a label is neither -100 nor its token's id, or lengths differ.
            OverflowError: For an id that does not fit into an int32. Nothing has been appended then.
        """
        check_encoded(chat.input_ids, chat.labels, chat.loss_weights)
        edges, weights = _runs(chat)
        ids = array("i", chat.input_ids)
        columns = self._buffers
        columns["ids.i32"].extend(ids)
        columns["edges.i32"].extend(edges)
        columns["weights.f32"].extend(weights)
        columns["lengths.i32"].append(len(chat.input_ids))
        columns["targets.i32"].append(chat.num_targets)
        columns["runs.i32"].append(len(weights))
        if len(columns["ids.i32"]) >= _FLUSH_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows to the files."""
        for name, values in self._buffers.items():
            with open(self.folder / name, "ab") as file:
                values.tofile(file)
            self._buffers[name] = array(_COLUMNS[name])


def joined(parts: Sequence[Path], target: Path, counts: FilterCounts) -> None:
    """Join folders, in order, into a new one and flush it to the disk; the files of the parts are deleted."""
    target.mkdir()
    for name in _COLUMNS:
        with open(target / name, "wb") as out:
            for part in parts:
                with open(part / name, "rb") as file:
                    shutil.copyfileobj(file, out, 16 << 20)
                (part / name).unlink()
    if not _any_weight(target):
        (target / "weights.f32").unlink()
    for name, of in _BEGINS.items():
        _write_begins(target / of, target / name)
    names = [path.name for path in sorted(target.iterdir())]
    for name in names:
        sync_file(target / name)
    about = {
        "counts": dict(counts),
        "indices": {reason: list(indices) for reason, indices in counts.indices.items()},
        "examples": counts.examples,
        "sizes": {name: (target / name).stat().st_size for name in names},
    }
    write_bytes(target / _ABOUT, json.dumps(about).encode())
    sync_folder(target)


def is_sound(folder: Path) -> bool:
    """Whether all files exist and have the size that ``about.json`` states."""
    try:
        sizes = _about(folder)["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, CheckpointCorruptError, KeyError, ValueError) as error:
        blame_no_file(error, folder)
        return False


class EncodedDataset(Sequence[EncodedChat]):
    """Encoded rows in memory-mapped files, as `encode_dataset` returns them.

    A row is an `EncodedChat`, made when it is indexed. Workers of a DataLoader and ranks of one machine share
    the memory of the files. Pickling stores only the path of the folder.

    Args:
        path: Folder of an encoded data set.

    Attributes:
        path: Folder of the encoded data set.
        counts: Numbers of rows that were kept and left out, with indices and examples by reason; see
            `FilterCounts`.
        lengths: Tokens of each row, int32 (N,).
        num_targets: Targets of each row after the shift, int32 (N,).

    Memory: The rows in use, and ``counts``; the files' pages belong to the system, which may drop them.

    Example:
        >>> encoded = fs.encode_dataset(rows, tokenizer, max_length=64, cache_dir="encoded")
        >>> type(encoded[0]).__name__, encoded.lengths.shape
        ('EncodedChat', torch.Size([8]))
        >>> sampler = fs.PackedSampler(
        ...     encoded.lengths, num_targets=encoded.num_targets, max_length=128
        ... )
        >>> first = [encoded[row] for row in next(iter(sampler))]
        >>> pack = fs.PackedCollator(max_length=128)(first)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        about = _about(self.path)
        if not is_sound(self.path):
            raise CheckpointCorruptError(f"a file of {self.path} is missing, or has another size; {_ANEW}")
        try:
            self.counts = FilterCounts.of(about["counts"], about["indices"], about["examples"])
        except MALFORMED as error:
            raise CheckpointCorruptError(f"{self.path / _ABOUT} is damaged: {error!r}; {_ANEW}") from None
        self._ids, self._edges = _mapped(self.path / "ids.i32"), _mapped(self.path / "edges.i32")
        self._weights = _mapped(self.path / "weights.f32") if "weights.f32" in about["sizes"] else None
        self._id_begins, self._run_begins = (_mapped(self.path / name) for name in _BEGINS)
        columns = [_mapped(self.path / name) for name in ("lengths.i32", "targets.i32")]
        if not all(map(len, columns)):
            raise CheckpointCorruptError(f"{self.path} has no rows; {_ANEW}")
        self.lengths, self.num_targets = (torch.frombuffer(one, dtype=torch.int32) for one in columns)
        rows = len(self.lengths)
        counts = {len(self._id_begins) - 1, len(self._run_begins) - 1, len(self.num_targets), rows}
        ends = None if len(counts) > 1 else (self._id_begins[rows], 2 * self._run_begins[rows])
        if ends != (len(self._ids), len(self._edges)):
            raise CheckpointCorruptError(f"the files of {self.path} do not belong together; {_ANEW}")

    def __len__(self) -> int:
        return len(self._id_begins) - 1

    @overload
    def __getitem__(self, index: int) -> EncodedChat: ...

    @overload
    def __getitem__(self, index: slice) -> list[EncodedChat]: ...

    def __getitem__(self, index: int | slice) -> EncodedChat | list[EncodedChat]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index = int(index) % len(self)
        ids = self._ids[self._id_begins[index] : self._id_begins[index + 1]].tolist()
        first, stop = self._run_begins[index], self._run_begins[index + 1]
        edges = self._edges[2 * first : 2 * stop].tolist()
        if not _is_row(len(ids), int(self.lengths[index]), edges, stop - first):
            raise CheckpointCorruptError(f"row {index} of {self.path} is damaged; {_ANEW}")
        labels = [IGNORE_INDEX] * len(ids)
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            labels[begin:end] = ids[begin:end]
        if self._weights is None:
            return EncodedChat(ids, labels)
        values = self._weights[first:stop].tolist()
        if len(values) != stop - first:
            raise CheckpointCorruptError(f"row {index} of {self.path} has no weights; {_ANEW}")
        if all(value == 1 for value in values):
            return EncodedChat(ids, labels)
        weights = [1.0] * len(ids)
        for begin, end, value in zip(edges[::2], edges[1::2], values, strict=True):
            weights[begin:end] = [value] * (end - begin)
        return EncodedChat(ids, labels, weights)

    def __reduce__(self) -> tuple[type[EncodedDataset], tuple[Path]]:
        return EncodedDataset, (self.path,)

    def __repr__(self) -> str:
        return f"EncodedDataset({str(self.path)!r}, {len(self)} rows, {len(self._ids)} tokens)"


def _is_row(length: int, said: int, edges: list[int], runs: int) -> bool:
    """Whether a row's edges rise within its length; a damaged one could claim any length."""
    rising = all(a <= b for a, b in pairwise(edges))
    return (
        length == said
        and len(edges) == 2 * runs
        and rising
        and (not edges or 0 <= edges[0] <= edges[-1] <= length)
    )


def _about(folder: Path) -> dict[str, Any]:
    """What ``about.json`` says.

    Raises:
        CheckpointCorruptError: If it is damaged.
        FileNotFoundError: If there is none.
    """
    path = folder / _ABOUT
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "no folder of encoded rows", str(path))
    try:
        about: dict[str, Any] = parse_json(read_bytes(path, MAX_JSON_BYTES), _ABOUT)
        if not {*_BEGINS, *_COLUMNS} - {"weights.f32"} <= about["sizes"].keys():
            raise ValueError("it does not say the sizes of the files")
    except MALFORMED as error:
        raise CheckpointCorruptError(f"{path} is damaged: {error}; {_ANEW}") from None
    return about


def _runs(chat: EncodedChat) -> tuple[list[int], list[float]]:
    """(begin and end of each run of trained tokens of one weight, in one list; weight of each run)."""
    ids, labels, given = chat.input_ids, chat.labels, chat.loss_weights
    edges: list[int] = []
    weights: list[float] = []
    position, length = 0, len(ids)
    while position < length:
        if labels[position] == IGNORE_INDEX:
            position = _end_of(labels, IGNORE_INDEX, position)
            continue
        try:
            end = labels.index(IGNORE_INDEX, position)
        except ValueError:
            end = length
        if labels[position:end] != ids[position:end]:
            raise ValueError(
                "labels must be the row's own ids or -100; give rows with other labels to a collator"
            )
        for begin, stop in [(position, end)] if given is None else _of_one_weight(given, position, end):
            edges += [begin, stop]
            weights.append(1.0 if given is None else given[begin])
        position = end
    return edges, weights


def _end_of(values: list[int], value: int, start: int) -> int:
    """The first index from ``start`` on with another value; the length if there is none."""
    return next((i for i in range(start, len(values)) if values[i] != value), len(values))


def _of_one_weight(weights: list[float], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of equal weights in [start, stop)."""
    while start < stop:
        end = next((i for i in range(start, stop) if weights[i] != weights[start]), stop)
        yield start, end
        start = end


def _mapped(path: Path) -> Any:
    """A memoryview of the numbers in a memory-mapped file."""
    code = {".i32": "i", ".f32": "f", ".i64": "q"}[path.suffix]
    try:
        fd = open_file(path)
    except CheckpointFormatError as error:
        raise CheckpointCorruptError(f"{error}; {_ANEW}") from None
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size % struct.calcsize(code):
            raise CheckpointCorruptError(f"{path} has {size} bytes, no whole number of entries; {_ANEW}")
        if not size:
            return memoryview(bytearray()).cast(code)  # type: ignore[call-overload]
        # Writable, since torch warns about read-only buffers; private, so that no write reaches the file.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=access)
        return memoryview(mapped).cast(code)  # type: ignore[call-overload]


def _any_weight(folder: Path) -> bool:
    """Whether a run has a weight other than 1."""
    values = _mapped(folder / "weights.f32")
    return bool(len(values)) and bool((torch.frombuffer(values, dtype=torch.float32) != 1).any())


def _write_begins(sizes: Path, target: Path) -> None:
    """Write the index at which each row begins: the running sum of the sizes, from 0 to the total."""
    total = 0
    with open(target, "wb") as file:
        array("q", [0]).tofile(file)
        for block in _blocks(_mapped(sizes)):
            ends = array("q", accumulate(block, initial=total))
            total = ends[-1]
            ends[1:].tofile(file)


def _blocks(values: Any) -> Iterable[list[int]]:
    """The numbers in lists of bounded length."""
    for start in range(0, len(values), _FLUSH_TOKENS):
        yield values[start : start + _FLUSH_TOKENS].tolist()

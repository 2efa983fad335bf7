"""The files of encoded rows, and the sequence of rows that reads them.

- ``ids.i32``, ``labels.i32``: token ids and labels of all rows, one row after the other
- ``lengths.i32``, ``targets.i32``: numbers of tokens and of targets of each row
- ``about.json``: counts, and the size of each file; written last
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
from array import array
from collections.abc import Sequence
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

_COLUMNS = ("ids.i32", "labels.i32", "lengths.i32", "targets.i32")
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
        self._buffers: dict[str, array[int]] = {name: array("i") for name in _COLUMNS}

    def add(self, chat: EncodedChat) -> None:
        """Append a row.

        Raises:
            ValueError: If ids and labels have different lengths.
            OverflowError: For a number that does not fit into an int32. Nothing has been appended then.
        """
        check_encoded(chat.input_ids, chat.labels)
        row = array("i", chat.input_ids), array("i", chat.labels), [len(chat.input_ids)], [chat.num_targets]
        for values, more in zip(self._buffers.values(), row, strict=True):
            values.extend(more)
        if len(self._buffers["ids.i32"]) >= _FLUSH_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows to the files."""
        for name, values in self._buffers.items():
            with open(self.folder / name, "ab") as file:
                values.tofile(file)
            self._buffers[name] = array("i")


def joined(parts: Sequence[Path], target: Path, counts: FilterCounts) -> None:
    """Join folders, in order, into a new one and flush it to the disk; the files of the parts are deleted."""
    target.mkdir()
    for name in _COLUMNS:
        with open(target / name, "wb") as out:
            for part in parts:
                with open(part / name, "rb") as file:
                    shutil.copyfileobj(file, out, 16 << 20)
                (part / name).unlink()
        sync_file(target / name)
    about = {
        "counts": dict(counts),
        "indices": {reason: list(indices) for reason, indices in counts.indices.items()},
        "examples": counts.examples,
        "sizes": {name: (target / name).stat().st_size for name in _COLUMNS},
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

    Memory: The rows in use, 8 bytes a row, and ``counts``; the files' pages belong to the system, which may
    drop them.

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
        self._ids, self._labels, self.lengths, self.num_targets = (
            _mapped(self.path / name) for name in _COLUMNS
        )
        if not len(self.lengths):
            raise CheckpointCorruptError(f"{self.path} has no rows; {_ANEW}")
        ends = self.lengths.cumsum(0)
        sizes = len(self._ids), len(self._labels), len(self.num_targets)
        if sizes != (int(ends[-1]), int(ends[-1]), len(self.lengths)) or int(self.lengths.min()) < 1:
            raise CheckpointCorruptError(f"the files of {self.path} do not belong together; {_ANEW}")
        self._begins = ends - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> EncodedChat: ...

    @overload
    def __getitem__(self, index: slice) -> list[EncodedChat]: ...

    def __getitem__(self, index: int | slice) -> EncodedChat | list[EncodedChat]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        begin, length = int(self._begins[index]), int(self.lengths[index])
        kept = slice(begin, begin + length)
        return EncodedChat(self._ids[kept].tolist(), self._labels[kept].tolist())

    def __reduce__(self) -> tuple[type[EncodedDataset], tuple[Path]]:
        return EncodedDataset, (self.path,)

    def __repr__(self) -> str:
        return f"EncodedDataset({str(self.path)!r}, {len(self)} rows, {len(self._ids)} tokens)"


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
        if not set(_COLUMNS) <= about["sizes"].keys():
            raise ValueError("it does not say the sizes of the files")
    except MALFORMED as error:
        raise CheckpointCorruptError(f"{path} is damaged: {error}; {_ANEW}") from None
    return about


def _mapped(path: Path) -> torch.Tensor:
    """The numbers in a memory-mapped file, int32 (N,)."""
    try:
        fd = open_file(path)
    except CheckpointFormatError as error:
        raise CheckpointCorruptError(f"{error}; {_ANEW}") from None
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size % 4:
            raise CheckpointCorruptError(f"{path} has {size} bytes, no whole number of entries; {_ANEW}")
        if not size:
            return torch.empty(0, dtype=torch.int32)
        # Writable, since torch warns about read-only buffers; private, so that no write reaches the file.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=access)
        return torch.frombuffer(mapped, dtype=torch.int32)

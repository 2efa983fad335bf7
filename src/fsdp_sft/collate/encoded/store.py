"""The files of encoded rows, and the sequence of rows that reads them.

Each file, such as ``00003-of-00012.safetensors``, is a shard: a section of the rows that were given. It holds
int32 tensors: ``ids`` and ``labels`` of its rows, one row after the other, and ``lengths`` and ``targets``,
numbers of tokens and of targets of each row. Its metadata are the counts of the section. A file gets its name
when it is complete.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import uuid
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import overload

import torch
from safetensors.torch import save

from fsdp_sft._process.bounds import parse_json
from fsdp_sft._process.codec import MALFORMED
from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.disk import sync_folder, write_bytes
from fsdp_sft._tensors.safetensors import open_file, read_header
from fsdp_sft.collate import EncodedChat, FilterCounts
from fsdp_sft.errors import CheckpointCorruptError, CheckpointFormatError

_COLUMNS = ("ids", "labels", "lengths", "targets")
_ANEW = "delete it, and encode the rows anew"


def shard_paths(folder: Path, number: int) -> list[Path]:
    """Paths of the files of a folder that has so many."""
    return [folder / f"{i:05d}-of-{number:05d}.safetensors" for i in range(number)]


class Shard:
    """Rows of one file.

    Attributes:
        columns: Numbers of all rows so far, by the name of the tensor.
        counts: Counts of the rows that were given, kept or not.
    """

    def __init__(self) -> None:
        self.columns = {name: array("i") for name in _COLUMNS}
        self.counts = FilterCounts()

    def add(self, chat: EncodedChat) -> None:
        """Append a row."""
        self.columns["ids"].extend(chat.input_ids)
        self.columns["labels"].extend(chat.labels)
        self.columns["lengths"].append(len(chat.input_ids))
        self.columns["targets"].append(chat.num_targets)

    def write(self, path: Path) -> None:
        """Write the rows to a file, which is on the disk when it gets its name."""
        tensors = {
            name: torch.frombuffer(values, dtype=torch.int32) if values else torch.empty(0, dtype=torch.int32)
            for name, values in self.columns.items()
        }
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        write_bytes(temporary, save(tensors, {"counts": json.dumps(self.counts.described())}))
        os.replace(temporary, path)
        sync_folder(path.parent)


def read_shard(path: Path) -> tuple[dict[str, torch.Tensor], FilterCounts]:
    """The memory-mapped tensors of a file, int32 (N,), and its counts.

    Raises:
        CheckpointCorruptError: If it is damaged.
        OSError: If it cannot be read.
    """
    try:
        with os.fdopen(open_file(path), "rb") as file:
            header = read_header(file.fileno())
            # Writable, since torch warns about read-only buffers; private, so that no write reaches the file.
            access = mmap.PROT_READ | mmap.PROT_WRITE
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=access)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        columns = {
            name: flat[entry.start : entry.end].view(torch.int32) for name, entry in header.entries.items()
        }
        counts = FilterCounts.of(parse_json(header.metadata["counts"].encode(), "counts"))
        ids, labels, lengths, targets = (columns[name] for name in _COLUMNS)
        total = int(lengths.sum(dtype=torch.int64))
        if (len(ids), len(labels), len(targets)) != (total, total, len(lengths)) or (lengths < 1).any():
            raise ValueError("its tensors do not belong together")
    except (CheckpointFormatError, RuntimeError, *MALFORMED) as error:
        raise CheckpointCorruptError(f"{path} is damaged: {error}; {_ANEW}") from None
    return columns, counts


def is_sound(path: Path) -> bool:
    """Whether there is a file of encoded rows that can be read."""
    try:
        read_shard(path)
    except (OSError, CheckpointCorruptError) as error:
        blame_no_file(error, path)
        return False
    return True


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

    Raises:
        FileNotFoundError: If there is no such folder.
        CheckpointCorruptError: If a file is missing or damaged.

    Memory: The rows in use, 16 bytes a row, and ``counts``; the files' pages belong to the system, which may
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
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(errno.ENOENT, "no folder of encoded rows", str(path))
        if files != shard_paths(self.path, len(files)):
            raise CheckpointCorruptError(f"a file of {path} is missing; encode the rows again, which adds it")
        self._shards, self.counts = [], FilterCounts()
        for file in files:
            columns, counts = read_shard(file)
            self._shards.append(columns)
            self.counts.join(counts)
        self.lengths, self.num_targets = (
            torch.cat([columns[name] for columns in self._shards]) for name in ("lengths", "targets")
        )
        lengths = [columns["lengths"] for columns in self._shards]
        self._begins = torch.cat([one.cumsum(0) - one for one in lengths])
        self._first_rows = [0, *accumulate(map(len, lengths))]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> EncodedChat: ...

    @overload
    def __getitem__(self, index: slice) -> list[EncodedChat]: ...

    def __getitem__(self, index: int | slice) -> EncodedChat | list[EncodedChat]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        columns = self._shards[bisect_right(self._first_rows, index) - 1]
        begin = int(self._begins[index])
        kept = slice(begin, begin + int(self.lengths[index]))
        return EncodedChat(columns["ids"][kept].tolist(), columns["labels"][kept].tolist())

    def __reduce__(self) -> tuple[type[EncodedDataset], tuple[Path]]:
        return EncodedDataset, (self.path,)

    def __repr__(self) -> str:
        tokens = int(self.lengths.sum(dtype=torch.int64))
        return f"EncodedDataset({str(self.path)!r}, {len(self)} rows, {tokens} tokens)"

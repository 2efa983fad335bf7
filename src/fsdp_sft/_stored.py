"""Tensors that lie in files: which bytes fill a rank's box of one."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_sft._boxes import Box
from fsdp_sft._limits import blame_no_file
from fsdp_sft._pieces import Ints, Piece, contiguous_strides, intersect
from fsdp_sft._reader import Job, Mode
from fsdp_sft._safetensors import Header, TensorEntry, open_file, read_header
from fsdp_sft.errors import CheckpointCorruptError, SafetensorsError


@dataclass(frozen=True)
class InFile:
    """A tensor, or one part of a tensor, in one run of a file.

    Attributes:
        file: Path of the file.
        entry: Dtype, shape and byte range.
    """

    file: Path
    entry: TensorEntry

    def piece(self, key: str, start: Ints | None = None) -> Piece:
        """All of it, as a piece of the tensor in which it begins at ``start``; None is the first element."""
        shape = self.entry.shape
        return Piece(
            start or (0,) * len(shape), shape, key, 0, self.entry.stride or contiguous_strides(shape)
        )

    def job(
        self,
        name: str,
        piece: Piece,
        box: Box,
        local: torch.Tensor,
        *,
        check_finite: bool = False,
        mode: Mode = "copy",
    ) -> Job | None:
        """What of a piece lies in a rank's box, as a job; None if nothing does.

        Args:
            name: Name of the parameter or buffer, for messages.
            piece: A box of the full tensor, as a strided view of what lies here.
            box: This rank's box of the full tensor.
            local: This rank's shard, the memory of ``box``.
            check_finite: See ``Job``.
            mode: See ``Job``.
        """
        part = intersect(piece, box)
        if part is None:
            return None
        place = Box(part.start, part.size).relative_to(box)
        start = self.entry.start + part.offset * self.entry.dtype.itemsize
        return Job(
            name,
            part.key,
            self.file,
            start,
            self.entry.dtype,
            part.size,
            part.stride,
            local[place.slices],
            check_finite,
            mode,
        )


class StoredFolder:
    """The safetensors files below a folder, which hold parts of tensors.

    A file is open only while its header is read; the headers are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._headers: dict[str, Header] = {}

    def header(self, file: str) -> Header:
        """The header of a file, checked and remembered.

        Raises:
            CheckpointCorruptError: If the file or its header is damaged or missing.
            OSError: If this process may open no more files, or may not open this one.
        """
        if file not in self._headers:
            try:
                fd = open_file(self.folder / file)
                try:
                    self._headers[file] = read_header(fd)
                finally:
                    os.close(fd)
            except (OSError, SafetensorsError) as error:
                blame_no_file(error, self.folder / file)
                raise CheckpointCorruptError(f"{self.folder / file} cannot be read: {error}") from error
        return self._headers[file]

    def jobs(self, key: str, parts: Iterable[tuple[str, Box]], box: Box, out: torch.Tensor) -> Iterator[Job]:
        """What fills ``out``, the box ``box`` of a tensor.

        Args:
            key: Name of the tensor in the files.
            parts: (file, box of the tensor that it has) pairs; they must cover ``box``.
            box: Box of the tensor that is wanted.
            out: Tensor to fill, of the box's shape, on any device; values are cast to its dtype.
        """
        for file, part in parts:
            if part.numel:
                stored = InFile(self.folder / file, self.header(file).entries[key])
                job = stored.job(key, stored.piece(key, part.offset), box, out)
                if job is not None:
                    yield job

"""The part of an export that needs no communication: each rank writes its own rows into the common files."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from fsdp_sft._ranks.agree import all_gather_objects, share
from fsdp_sft._tensors.disk import write_early
from fsdp_sft._tensors.packed_shard import values_of
from fsdp_sft._tensors.safetensors import bytes_of, force_to_disk
from fsdp_sft._tensors.sharding import own_part, sharding_of

_PIECE_ELEMENTS = 4 << 20

Places = Mapping[str, tuple[str, int]]  # tensor -> (file, byte at which it starts)


class OwnRows:
    """Files that rank 0 has made at their final size, opened by this rank.

    Args:
        places: File of each tensor, and the byte at which it begins.
        files: Open file descriptors, by the name of the file.

    Memory: One piece of 4 Mi elements in CPU memory.
    """

    def __init__(self, places: Places, files: Mapping[str, int]) -> None:
        self._places = places
        self._files = dict(files)

    def write(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Write this rank's rows of ``tensor`` as ``dtype``, unless a replica writes them."""
        box = own_part(tensor)
        if box is None:
            return
        file, start = self._places[name]
        if tensor.dim():
            start += box.offset[0] * math.prod(tensor.shape[1:]) * dtype.itemsize
        rows = values_of(tensor, dtype).reshape(-1)
        for first in range(0, box.numel, _PIECE_ELEMENTS):
            piece = rows[first : first + _PIECE_ELEMENTS].to("cpu", dtype).contiguous()
            write_early(self._files[file], start + first * dtype.itemsize, bytes_of(piece))

    def sync(self) -> None:
        """Force what was written to the disk."""
        for fd in self._files.values():
            force_to_disk(fd)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def open_own_rows(folder: Path, places: Places | None) -> OwnRows | None:
    """Open the files in rank 0's folder for writing; None if some rank does not see them.

    Args:
        folder: Folder of the export; rank 0's counts.
        places: File of each tensor, and the byte at which it begins, on rank 0; None if it has made no files.

    Collective: all ranks.
    """
    folder, shared = share((folder, places))  # the folder's temporary name is random: take rank 0's
    if shared is None:
        return None
    files: dict[str, int] = {}
    try:
        for file in sorted({file for file, _ in shared.values()}):
            files[file] = os.open(folder / file, os.O_WRONLY | os.O_NOFOLLOW)
    except OSError:  # for instance a folder that only rank 0's machine has
        seen = False
    else:
        seen = True
    opened = OwnRows(shared, files)
    if all(all_gather_objects(seen)):
        return opened
    opened.close()
    return None


def has_whole_rows(tensor: torch.Tensor) -> bool:
    """Whether each rank has whole rows of ``tensor``, which are contiguous; the same on all ranks."""
    parts = sharding_of(tensor).parts(tensor.shape)
    return all(box.shape[1:] == tuple(tensor.shape[1:]) for _, box in parts)

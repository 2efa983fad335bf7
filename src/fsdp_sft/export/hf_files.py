"""The weight files of a Hugging Face folder and their index. Tensors can be written in any order."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from fsdp_sft._ranks.agree import all_gather_objects, share
from fsdp_sft._tensors.disk import write_bytes, write_early
from fsdp_sft._tensors.packed_shard import values_of
from fsdp_sft._tensors.safetensors import Header, bytes_of, create, force_to_disk, num_bytes, write_at
from fsdp_sft._tensors.sharding import own_part, sharding_of

# The part of an export that needs no communication: each rank writes its own rows into the common files.

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


Described = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class HfFiles:
    """Rank 0's side of an export: files that have their final size from the start.

    Args:
        written: Dtype and shape of every tensor, by name and in order.

    Attributes:
        left: Names of the tensors that rank 0 has still to write.
    """

    def __init__(self, written: Described) -> None:
        self._written = written
        self.left = set(written)
        self._files: dict[str, tuple[int, Header]] = {}
        self._file_of: dict[str, str] = {}

    def start(self, folder: Path, max_shard_size: int | str, num_parameters: int) -> None:
        """Make the files, and an index if there are several.

        Args:
            folder: Folder of the export.
            max_shard_size: Largest size of one file, in bytes or as text such as ``"5GB"``.
            num_parameters: Number of the model's parameters, which goes into the index.
        """
        from huggingface_hub import split_state_dict_into_shards_factory

        split = split_state_dict_into_shards_factory(
            self._written,
            get_storage_size=lambda described: num_bytes(*described),
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        self._file_of = dict(split.tensor_to_filename)
        for file, names in split.filename_to_tensors.items():
            described = {name: self._written[name] for name in names}
            self._files[file] = create(folder / file, described, {"format": "pt"})[:2]
        if split.is_sharded:
            metadata = {"total_parameters": num_parameters, **split.metadata}
            index = {"metadata": metadata, "weight_map": self._file_of}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            write_bytes(folder / "model.safetensors.index.json", text.encode())

    def places(self) -> Places:
        """File of each tensor, and the byte of the file at which the tensor begins."""
        return {
            name: (file, self._files[file][1].entries[name].start) for name, file in self._file_of.items()
        }

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a full tensor.

        Raises:
            RuntimeError: If no tensor of that name, dtype and shape remains to be written.
        """
        if self._written.get(name) != (tensor.dtype, tuple(tensor.shape)) or name not in self.left:
            raise RuntimeError(
                f"{name} came out as {tensor.dtype} {tuple(tensor.shape)} when converted apart from the "
                "rest of the model; please report the architecture"
            )
        fd, header = self._files[self._file_of[name]]
        contiguous = tensor.contiguous()
        write_at(fd, header.entries[name].start, bytes_of(contiguous))
        self.left.remove(name)

    def finish(self) -> None:
        """Force everything to the disk.

        Raises:
            RuntimeError: If a tensor was never written.
        """
        if self.left:
            raise RuntimeError(
                f"no tensor was converted to {sorted(self.left)[:4]}; please report the architecture"
            )
        for fd, _ in self._files.values():
            force_to_disk(fd)

    def close(self) -> None:
        """Close the files."""
        for fd, _ in self._files.values():
            os.close(fd)

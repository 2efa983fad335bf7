"""The weight files of a Hugging Face folder and their index, which have their final size from the start."""

import json
import math
import os
from pathlib import Path

import torch

from fsdp_sft._ranks.agree import all_gather_objects, share, this_rank
from fsdp_sft._tensors.disk import write_bytes, write_early
from fsdp_sft._tensors.packed_shard import values_of
from fsdp_sft._tensors.safetensors import bytes_of, create, force_to_disk, num_bytes, write_at
from fsdp_sft._tensors.sharding import own_part, sharding_of

_PIECE_ELEMENTS = 4 << 20

Described = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class HfFiles:
    """Files that rank 0 makes, and into which the other ranks write their rows if they see them.

    Tensors can be written in any order.

    Args:
        folder: Folder of the export, the same on all ranks.
        written: Dtype and shape of every tensor, by name and in order.

    Memory: One piece of 4 Mi elements in CPU memory for rows.
    """

    def __init__(self, folder: Path, written: Described) -> None:
        self._folder, self._left = folder, dict(written)
        self._files: dict[str, int] = {}
        self._places: dict[str, tuple[str, int]] = {}  # file of each tensor, and the byte at which it begins

    def start(self, max_shard_size: int | str, num_parameters: int) -> None:
        """Make the files, and an index if there are several. Only rank 0 calls this.

        Args:
            max_shard_size: Largest size of one file, in bytes or as text such as ``"5GB"``.
            num_parameters: Number of the model's parameters, which goes into the index.
        """
        from huggingface_hub import split_state_dict_into_shards_factory

        split = split_state_dict_into_shards_factory(
            self._left,
            get_storage_size=lambda described: num_bytes(*described),
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        for file, names in split.filename_to_tensors.items():
            described = {name: self._left[name] for name in names}
            self._files[file], header, _ = create(self._folder / file, described, {"format": "pt"})
            self._places.update({name: (file, header.entries[name].start) for name in names})
        if split.is_sharded:
            metadata = {"total_parameters": num_parameters, **split.metadata}
            index = {"metadata": metadata, "weight_map": dict(split.tensor_to_filename)}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            write_bytes(self._folder / "model.safetensors.index.json", text.encode())

    def open_on_all(self) -> bool:
        """Open the files on the other ranks too; False if a rank does not see rank 0's folder.

        Collective: all ranks.
        """
        self._places = share(self._places)
        seen = bool(self._places)
        try:
            for file in sorted({file for file, _ in self._places.values()} - self._files.keys()):
                self._files[file] = os.open(self._folder / file, os.O_WRONLY | os.O_NOFOLLOW)
        except OSError:  # for instance a folder that only rank 0's machine has
            seen = False
        return all(all_gather_objects(seen))

    def write_rows(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Write this rank's rows of a tensor as ``dtype``, unless a replica writes them."""
        self._left.pop(name)
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

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a full tensor.

        Raises:
            RuntimeError: If no tensor of that name, dtype and shape remains to be written.
        """
        if self._left.pop(name, None) != (tensor.dtype, tuple(tensor.shape)):
            raise RuntimeError(
                f"{name} came out as {tensor.dtype} {tuple(tensor.shape)} when converted apart from the "
                "rest of the model; please report the architecture"
            )
        file, start = self._places[name]
        contiguous = tensor.contiguous()
        write_at(self._files[file], start, bytes_of(contiguous))

    def finish(self) -> None:
        """Force what was written to the disk.

        Raises:
            RuntimeError: If rank 0 has not written a tensor.
        """
        if self._left and this_rank() == 0:
            raise RuntimeError(
                f"no tensor was converted to {sorted(self._left)[:4]}; please report the architecture"
            )
        for fd in self._files.values():
            force_to_disk(fd)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def has_whole_rows(tensor: torch.Tensor) -> bool:
    """Whether each rank has whole rows of ``tensor``, which are contiguous; the same on all ranks."""
    parts = sharding_of(tensor).parts(tensor.shape)
    return all(box.shape[1:] == tuple(tensor.shape[1:]) for _, box in parts)

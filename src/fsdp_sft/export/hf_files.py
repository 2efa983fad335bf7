"""The weight files of a Hugging Face folder and their index. Tensors can be written in any order."""

import json
import os
from pathlib import Path

import torch

from fsdp_sft._tensors.disk import write_bytes
from fsdp_sft._tensors.safetensors import Header, bytes_of, create, force_to_disk, num_bytes, write_at
from fsdp_sft.export.own_rows import Places

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

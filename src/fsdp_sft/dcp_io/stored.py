"""The tensors of a checkpoint: shape, dtype, and which file has which part."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_sft._tensors.boxes import Box, whole
from fsdp_sft._tensors.sharding import Sharding

SHARDS = "shards"
_MOST_DIMS = 64  # torch's own limit
_MOST_SIZE = (1 << 63) - 1


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, whose sharding determines which rank's file has which part.

    Attributes:
        shape: Shape of the full tensor.
        dtype: Dtype of its elements.
        key: Name of the tensor in the files.
        sharding: Sharding of the tensor.
        copy: Number of the copy that was written, of those that the sharding has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str
    sharding: Sharding
    copy: int = 0

    def parts(self, wanted: Box | None = None) -> Iterator[tuple[str, Box]]:
        """(file, box in it) of the parts that intersect ``wanted`` (None: the whole tensor)."""
        wanted = wanted or whole(self.shape)
        for rank, box in self.sharding.parts(self.shape, self.copy, wanted):
            yield shard_file(rank), box

    def part_in(self, file: str) -> Box | None:
        """The box of the tensor that one file has; None if it has none."""
        return self.sharding.part_of_rank(self.shape, self.copy, rank_of(file))


def checked_shape(name: str, numbers: Sequence[Any]) -> tuple[int, ...]:
    """A shape or an offset from a file, checked.

    Raises:
        ValueError: If no tensor can have it.
    """
    if len(numbers) > _MOST_DIMS or any(type(n) is not int or not 0 <= n <= _MOST_SIZE for n in numbers):
        raise ValueError(f"the shape or a part of {name} is not valid")
    return tuple(numbers)


def missing_files(tensor: StoredTensor, wanted: Box | None, files: Collection[str]) -> list[str]:
    """Files that have parts of a tensor that intersect ``wanted``, but are not among ``files``."""
    return [file for file, _ in tensor.parts(wanted) if file not in files]


def shard_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"{SHARDS}/{rank:05d}.safetensors"


def rank_of(file: str) -> int:
    """The rank that writes a file; the inverse of ``shard_file``."""
    return int(file.removeprefix(f"{SHARDS}/").removesuffix(".safetensors"))


def file_key(section: str, name: str) -> str:
    """Name of a tensor in the files, with dots between all parts as in torch's distributed checkpoints."""
    return f"{section}.{name.replace('/', '.')}"


def expected_in(file: str, tensors: Iterable[StoredTensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor that a file's header must have, by name in the file."""
    found = ((tensor, tensor.part_in(file)) for tensor in tensors)
    return {tensor.key: (tensor.dtype, box.shape) for tensor, box in found if box is not None}

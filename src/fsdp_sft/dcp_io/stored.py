"""A tensor of a checkpoint: its shape, its dtype, and which file has which part of it."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_sft._boxes import Box, whole
from fsdp_sft.dcp_io.sharding import Sharding

SHARDS = "shards"
_MOST_DIMS = 64  # torch's own limit
_MOST_SIZE = (1 << 63) - 1


@dataclass(frozen=True)
class Derived:
    """Parts that follow from a sharding, in one file a rank.

    Attributes:
        sharding: Which rank has what.
        copy: Which of the ranks that have the same has written it.
    """

    sharding: Sharding
    copy: int = 0


@dataclass(frozen=True)
class Listed:
    """Parts that are listed one by one, as format versions 1 and 2 do.

    Attributes:
        chunks: (file, part of the tensor that it has) pairs; together they tile the tensor.
    """

    chunks: tuple[tuple[str, Box], ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint.

    Attributes:
        shape: Of the full tensor.
        dtype: Of its elements.
        key: Its name in the files.
        place: Where its parts are.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str
    place: Derived | Listed

    def parts(self, wanted: Box | None = None) -> Iterator[tuple[str, Box]]:
        """(file, part that it has) of the parts that meet ``wanted``; None wants all of the tensor."""
        wanted = wanted or whole(self.shape)
        if isinstance(self.place, Derived):
            for rank, box in self.place.sharding.parts(self.shape, self.place.copy, wanted):
                yield shard_file(rank), box
            return
        for file, box in self.place.chunks:
            common = box.intersect(wanted)
            if common is not None and common.numel:
                yield file, box

    def part_in(self, file: str) -> Box | None:
        """What one file has of it; None if nothing."""
        if isinstance(self.place, Derived):
            return self.place.sharding.part_of_rank(self.shape, self.place.copy, rank_of(file))
        return next((box for name, box in self.place.chunks if name == file), None)


def checked_shape(name: str, numbers: Sequence[Any]) -> tuple[int, ...]:
    """A shape or an offset that came from a file.

    Raises:
        ValueError: If no tensor can have it.
    """
    if len(numbers) > _MOST_DIMS or any(type(n) is not int or not 0 <= n <= _MOST_SIZE for n in numbers):
        raise ValueError(f"the shape or a part of {name} is not valid")
    return tuple(numbers)


def missing_files(tensor: StoredTensor, wanted: Box | None, files: Collection[str]) -> list[str]:
    """Files that have parts of a tensor which meet ``wanted``, and are not among ``files``."""
    return [file for file, _ in tensor.parts(wanted) if file not in files]


def shard_file(rank: int) -> str:
    """The file that a rank writes."""
    return f"{SHARDS}/{rank:05d}.safetensors"


def rank_of(file: str) -> int:
    """The inverse."""
    return int(file.removeprefix(f"{SHARDS}/").removesuffix(".safetensors"))


def file_key(section: str, name: str) -> str:
    """A tensor's name in the files, as torch's distributed checkpoints name it: dots between all parts."""
    return f"{section}.{name.replace('/', '.')}"


def expected_in(file: str, tensors: Iterable[StoredTensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What a file's header must say of each tensor."""
    found = ((tensor, tensor.part_in(file)) for tensor in tensors)
    return {tensor.key: (tensor.dtype, box.shape) for tensor, box in found if box is not None}

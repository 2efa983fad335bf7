"""The tensors of a checkpoint: shape, dtype, and which file has which part."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from fsdp_sft._tensors.boxes import Box, whole
from fsdp_sft._tensors.sharding import Sharding

SHARDS = "shards"
_MOST_NAMED = 100


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


def missing_files(tensor: StoredTensor, wanted: Box | None, files: Collection[str]) -> list[str]:
    """Files that have parts of a tensor that intersect ``wanted``, but are not among ``files``.

    The first hundred: a manifest may claim a million ranks beside no file at all.
    """
    missing = (file for file, _ in tensor.parts(wanted) if file not in files)
    return list(islice(missing, _MOST_NAMED))


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

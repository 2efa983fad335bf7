"""The stored tensors of a checkpoint while it is found out which of them belong together."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdp_sft._quantised.settings import Settings
from fsdp_sft._tensors.boxes import whole
from fsdp_sft._tensors.packed import Decode, Packed, StoredPart
from fsdp_sft._tensors.reader import do_reads
from fsdp_sft._tensors.safetensors import TensorEntry
from fsdp_sft._tensors.stored import InFile, Ints
from fsdp_sft.errors import CheckpointFormatError, abridged

_OF_SCALES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8)
_MAX_READ_BYTES = 1 << 16  # of a tensor that says how others are packed


class Tensors:
    """The tensors of one checkpoint by name, each of which one format may use.

    Attributes:
        stored: The stored tensors, by name.
        settings: How the checkpoint is quantised, according to its config.
        packed: Tensors that were made of stored ones, by the names that they are published under.
        used: Names of the stored tensors that they were made of, and what each was used for.
    """

    def __init__(self, stored: Mapping[str, InFile], settings: Settings) -> None:
        self.stored, self.settings = stored, settings
        self.packed: dict[str, Packed] = {}
        self.used: dict[str, str] = {}

    def is_free(self, key: str) -> bool:
        """Whether there is such a tensor that nothing has used."""
        return key in self.stored and key not in self.used

    def is_of(self, key: str, *dtypes: torch.dtype) -> bool:
        """Whether there is such a tensor of one of these dtypes that nothing has used."""
        return self.is_free(key) and self.stored[key].entry.dtype in dtypes

    def first(self, keys: Iterable[str]) -> str | None:
        """The only one of these tensors that there is; None if there is none.

        Raises:
            CheckpointFormatError: If there are several.
        """
        there = [key for key in keys if self.is_free(key)]
        if len(there) > 1:
            raise self.settings.refused(f"{abridged(there)} are scales of one tensor, in two ways")
        return there[0] if there else None

    def matrix(self, key: str) -> Ints:
        """The shape of a tensor, which must be a matrix or several.

        Raises:
            CheckpointFormatError: If it has fewer than two dimensions, or is empty.
        """
        shape = self.stored[key].entry.shape
        if len(shape) < 2 or 0 in shape:
            raise self.settings.refused(f"{key!r} of shape {shape} is packed, and no matrix")
        return shape

    def take(self, key: str, owner: str, dtypes: Sequence[torch.dtype] = _OF_SCALES) -> InFile:
        """A tensor that belongs to ``owner``, which no other may use.

        Raises:
            CheckpointFormatError: If there is none, another uses it, or it has none of these dtypes.
        """
        if key not in self.stored:
            raise self.settings.refused(f"{owner!r} is packed, and {key!r}, which it needs, is not there")
        if key in self.used:
            raise self.settings.refused(f"{key!r} belongs to {self.used[key]!r} and to {owner!r}")
        stored = self.stored[key]
        if stored.entry.dtype not in dtypes:
            names = abridged(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.settings.refused(f"{key!r} is of {stored.entry.dtype}, where {names} is expected")
        self.used[key] = owner
        return stored

    def shaped(self, key: str, shape: Ints, owner: str, dtypes: Sequence[torch.dtype] = _OF_SCALES) -> InFile:
        """The same, of a given shape.

        Raises:
            CheckpointFormatError: As ``take``, and if it has another shape.
        """
        stored = self.take(key, owner, dtypes)
        if stored.entry.shape != shape:
            raise self.mismatch(key, shape, owner)
        return stored

    def mismatch(self, key: str, wanted: Ints | str, owner: str) -> CheckpointFormatError:
        """The error about a tensor whose shape does not go with that of its owner."""
        return self.settings.refused(
            f"{key!r} has shape {tuple(self.stored[key].entry.shape)}, where {owner!r} of shape "
            f"{tuple(self.stored[owner].entry.shape)} needs {wanted}"
        )

    def one(self, key: str, owner: str) -> StoredPart:
        """A tensor of one float32 number, for all values.

        Raises:
            CheckpointFormatError: As ``take``, and if it has more elements.
        """
        stored = self.take(key, owner, (torch.float32,))
        if math.prod(stored.entry.shape) != 1:
            raise self.mismatch(key, "one number", owner)
        return StoredPart(stored)

    def grid(
        self, key: str, shape: Ints, blocks: Iterable[Ints | None], owner: str
    ) -> tuple[StoredPart, str]:
        """The scales of a tensor, and how they are laid out, in words.

        Args:
            key: Name of the scales.
            shape: Shape of the values.
            blocks: Numbers of (rows, columns) that may share a scale, of which 0 is all; None is one scale
                for the whole tensor.
            owner: Name of the packed tensor.

        Raises:
            CheckpointFormatError: As ``take``, and if the scales are of none of these layouts.
        """
        stored = self.take(key, owner)
        there, (*lead, height, width) = stored.entry.shape, shape
        wanted: list[Ints] = []
        for block in blocks:
            if block is None:
                wanted.append((1,))
                if math.prod(there) == 1:
                    return StoredPart(stored), "per tensor"
                if not lead:
                    continue
                block = (0, 0)  # one for each of several matrices
            down, across = block[0] or height, block[1] or width
            rows, columns = -(-height // down), -(-width // across)
            wanted.append((*lead, rows, columns))
            shapes = [wanted[-1]]
            shapes += [wanted[-1][:-1]] if columns == 1 else []
            shapes += [tuple(lead)] if columns == rows == 1 and lead else []
            if there in shapes:
                named = "per channel" if block == (1, 0) else "per tensor" if block == (0, 0) else None
                each = (down, across if columns > 1 else 0)
                return StoredPart(stored, each, columns), named or f"{down}x{across}"
        named = " or ".join(map(str, dict.fromkeys(wanted))) or "a scheme of its dtype in the config"
        raise self.mismatch(key, named, owner)

    def add(
        self,
        name: str,
        owner: str,
        form: str,
        shape: Ints,
        parts: Mapping[str, StoredPart],
        decode: Decode,
        *,
        rows: Ints | None = None,
        stride: Ints | None = None,
        dtype: torch.dtype = torch.float32,
        by_rows: Decode | None = None,
    ) -> None:
        """Add a tensor that was made of stored ones, all of which are taken.

        Args:
            name: Name that it is published under.
            owner: Name of the packed tensor.
            form: Name of the format.
            shape: Shape that it is published in.
            parts: See ``Packed``.
            decode: See ``Packed``.
            rows: (height, width) of each matrix as it is stored; None: as published.
            stride: Strides of the published tensor in the stored values.
            dtype: Dtype that holds all values.
            by_rows: See ``Packed``.

        Raises:
            CheckpointFormatError: If the name is taken, by a packed tensor or a stored one.
        """
        if name in self.packed or self.is_free(name):
            raise self.settings.refused(f"{name!r} is stored in two ways, one of them as {owner!r}")
        height, width = rows or shape[-2:]
        if 0 in (height, width):
            raise self.settings.refused(f"{owner!r} is empty")
        size = sum(part.stored.entry.num_bytes for part in parts.values())
        entry = TensorEntry(dtype, shape, 0, size)
        self.packed[name] = Packed(entry, form, width, height, parts, decode, by_rows, stride)

    def read(self, key: str) -> torch.Tensor:
        """The elements of a small tensor, which say how others are packed.

        Raises:
            CheckpointFormatError: If it is not small, or cannot be read.
        """
        stored = self.stored[key]
        if stored.entry.num_bytes > _MAX_READ_BYTES:
            raise self.settings.refused(f"{key!r} has {stored.entry.num_bytes} bytes: it cannot be a setting")
        tensor = torch.empty(stored.entry.shape, dtype=stored.entry.dtype)
        do_reads(stored.reads(stored.piece(key), whole(stored.entry.shape), tensor))
        return tensor


# What a way to quantise is made of; each is a file, which ``find.METHODS`` lists by the name in configs.


@dataclass(frozen=True)
class Method:
    """A way to quantise.

    Attributes:
        check: Refuses what is not read, by the config alone.
        find: Adds the weights among some stored tensors.
        parts: Pattern of the names that tensors of packed weights have, and no others.
        bits: Bits that a value in a row takes with its share of the scales, by the config and the number of
            dimensions of the weight; 0 if such a weight is not packed. It serves the planner, which sees no
            files. None if rows have no bytes of their own.
        skips: Fields of the config that list modules in 16 bits. It serves the planner.
        transposed: Whether the columns of packed weights are the next to last dimension in the model.
    """

    check: Callable[[Settings], object]
    find: Callable[[Tensors, Iterable[str]], None]
    parts: str
    bits: Callable[[Settings, int], float] | None = None
    skips: tuple[str, ...] = ()
    transposed: bool = False

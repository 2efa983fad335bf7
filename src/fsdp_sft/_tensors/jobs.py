"""Jobs for the reader: what a rank reads from stored tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from fsdp_sft._tensors.pieces import Ints, is_row_major

Mode = Literal["copy", "compare"]


@dataclass(frozen=True)
class Job:
    """A strided box of one stored tensor, and the memory that it is read into.

    Attributes:
        name: Name of the parameter or buffer, for messages.
        key: Name of the stored tensor in its file.
        file: Path of the file.
        start: Byte of the file at which the box begins.
        dtype: Dtype of the stored elements.
        size: Extent of the box, per dimension.
        stride: Distance between neighbours in the file, in stored elements, per dimension.
        dest: View of the shard, of that size.
        check_finite: Whether NaN and infinity are errors.
        mode: ``"copy"`` fills ``dest``; ``"compare"`` requires that it has the same values already.
    """

    name: str
    key: str
    file: Path
    start: int
    dtype: torch.dtype
    size: Ints
    stride: Ints
    dest: torch.Tensor
    check_finite: bool = False
    mode: Mode = "copy"

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored elements."""
        return self.dest.numel() * self.dtype.itemsize

    @cached_property
    def is_direct(self) -> bool:
        """Whether the bytes can be read straight into ``dest``."""
        dest = self.dest
        return (
            self.mode == "copy"
            and not self.check_finite
            and dest.is_cpu
            and dest.dtype == self.dtype
            and dest.is_contiguous()
            and is_row_major(self.size, self.stride)
        )


@dataclass(frozen=True)
class ByteRange:
    """A run of bytes of a file."""

    file: Path
    start: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Computation:
    """A box of values that are computed from several runs of bytes.

    Attributes:
        name: Name of the parameter or buffer, for messages.
        key: Name of the stored tensor.
        runs: What is read for it; small enough to be held at once.
        compute: Function from the bytes of the runs, each uint8 and on the device of ``dest``, to the values.
        dest: View of the shard, of the values' size.
        check_finite: Whether NaN and infinity are errors.
        mode: See ``Job``.
    """

    name: str
    key: str
    runs: tuple[ByteRange, ...]
    compute: Callable[[list[torch.Tensor]], torch.Tensor]
    dest: torch.Tensor
    check_finite: bool = False
    mode: Mode = "copy"

    @property
    def num_bytes(self) -> int:
        """Bytes of the runs."""
        return sum(run.num_bytes for run in self.runs)

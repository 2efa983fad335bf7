"""Shards that keep packed bytes: FSDP2 gathers the bytes, and the model sees the values.

A weight's values lie in rows: those of a matrix, or of the matrices of a stack. Each row keeps what its
values are computed from side by side (codes and scales), so that any rows of any rank can be put next to each
other: uneven shards, experts that ranks share out, and stacks that were published as many matrices.

Which rank computes what is FSDP2's: a parameter's shard has ``fsdp_pre_all_gather``, which hands over bytes,
and ``fsdp_post_all_gather``, which gets those of all ranks (torch 2.13, ``_fsdp_param.py``).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_sft._tensors.packed import RowFormat
from fsdp_sft._tensors.stored import Ints
from fsdp_sft.errors import UnsupportedModelError


@dataclass(frozen=True)
class PackedLayout:
    """How a parameter lies in rows.

    Attributes:
        form: Format of its rows.
        shape: Shape of the whole parameter, or of the experts of the ranks that gather it.
        transposed: Whether its columns are its next to last dimension, as in gpt-oss's experts.
    """

    form: RowFormat
    shape: Ints
    transposed: bool = False

    @property
    def rows_each(self) -> int:
        """Number of rows for each index of the first dimension."""
        return math.prod(self.shape[1:]) // self.form.width

    def shard_rows(self, num_shards: int) -> int:
        """Number of rows that each rank has memory for: those of the fullest one."""
        return -(-self.shape[0] // num_shards) * self.rows_each

    def fill(self, rows: torch.Tensor, place: torch.Tensor) -> None:
        """Compute a parameter's values, from the bytes of its rows, in its own shape."""
        if not self.transposed:
            self.form.values_into(rows, place.view(-1, self.form.width))
            return
        for index, own in enumerate(rows.view(len(place), self.rows_each, self.form.row_bytes)):
            values = torch.empty(self.rows_each, self.form.width, dtype=place.dtype, device=place.device)
            self.form.values_into(own, values)
            place[index].copy_(values.t())


class PackedShard(torch.Tensor):
    """A rank's shard of a frozen parameter, as bytes.

    It says that it has the size of the fullest rank's shard, and has bytes for as many rows: FSDP2 gathers
    equal parts only.

    Attributes:
        rows: Bytes of the rows, ``(rows, row_bytes)``; those beyond ``count`` are filler.
        lies: How the parameter lies in them.
        count: Number of indices of the first dimension that are this rank's.
        format: Name of the format of its rows.
    """

    @staticmethod
    def __new__(
        cls, rows: torch.Tensor, layout: PackedLayout, count: int, dtype: torch.dtype
    ) -> "PackedShard":
        size = (len(rows) // layout.rows_each, *layout.shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=rows.device)

    def __init__(self, rows: torch.Tensor, layout: PackedLayout, count: int, dtype: torch.dtype) -> None:
        self.rows, self.lies, self.count, self.format = rows, layout, count, layout.form.name

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedShard({self.format}, {tuple(self.shape)}, {self.rows.numel():,} bytes)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a frozen weight whose shards are kept in {self.format} is not pickled: save_checkpoint "
            "writes a step that names it, and save_full_state_dict its values"
        )

    @property
    def own_rows(self) -> torch.Tensor:
        """The bytes without the filler."""
        return self.rows[: self.count * self.lies.rows_each]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's part of the parameter as an ordinary tensor."""
        made = torch.empty((self.count, *self.lies.shape[1:]), dtype=dtype, device=self.rows.device)
        self.lies.fill(self.own_rows, made)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        shard, kwargs, name = args[0], kwargs or {}, func.overloadpacket.__name__
        if isinstance(shard, cls):
            # FSDP2 flattens its reference to a shard, which nothing reads, and narrows what it has pinned.
            whole = name == "slice" and args[1:4] == (0, 0, shard.shape[0])
            if whole or name in ("detach", "view", "alias"):
                return cls(shard.rows, shard.lies, shard.count, shard.dtype)
            source = args[1] if len(args) > 1 else None
            if name == "copy_" and isinstance(source, cls) and source.lies.form.is_like(shard.lies.form):
                shard.rows.copy_(source.rows)
                torch.autograd.graph.increment_version(shard.rows)  # which nothing does below autograd
                return shard
            if name == "is_pinned":
                return shard.rows.is_pinned()
            if name == "_pin_memory":
                return cls(shard.rows.pin_memory(), shard.lies, shard.count, shard.dtype)
            if name == "_to_copy" and kwargs.get("dtype") in (None, shard.dtype):
                device, waits = kwargs.get("device"), not kwargs.get("non_blocking", False)
                moved = shard.rows.to(device or shard.rows.device, non_blocking=not waits, copy=True)
                return cls(moved, shard.lies, shard.count, shard.dtype)
        raise UnsupportedModelError(
            f"{name} of a frozen weight whose shards are kept packed: only its gathered values can be "
            "computed with; fsdp_sft exports and merges it"
        )

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """What FSDP2 gathers."""
        return (self.rows.view(-1),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The values, from the bytes of all ranks."""
        layout = self.lies
        rows = outputs[0].view(-1, layout.form.row_bytes)[: layout.shape[0] * layout.rows_each]
        if out is not None:
            layout.fill(rows, (out._local_tensor if isinstance(out, DTensor) else out).data)
            return None
        made = torch.empty(layout.shape, dtype=param_dtype, device=rows.device)
        layout.fill(rows, made)
        return made, (made,)

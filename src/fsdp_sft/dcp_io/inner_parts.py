"""Optimizer state in tensor subclasses, reassembled from the inner tensors that were stored.

For the same shards it is restored bitwise. For other shards it can be reassembled if they begin and end at
block boundaries: a subclass quantises elements in blocks, each with separate values (such as a scale).
Slicing a tensor of the class shows how large the blocks of an inner tensor are, or that it is a table of
values that is the same for every shard.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_sft._process.codec import decode
from fsdp_sft._tensors.boxes import Box, box_of, with_local
from fsdp_sft._tensors.safetensors import DTYPES
from fsdp_sft._tensors.stored import StoredFolder
from fsdp_sft.dcp_io.folder import read_tensors
from fsdp_sft.dcp_io.inner_tensors import PLAIN
from fsdp_sft.dcp_io.stored import StoredTensor
from fsdp_sft.errors import CheckpointMismatchError

Part = dict[str, Any]


@dataclass(frozen=True)
class _Piece:
    """A run of elements in the intersection of a stored part with the wanted shard.

    Attributes:
        index: Number of the part.
        in_part: First element of the run, counted in the part.
        in_shard: First element of the run, counted in the shard.
        size: Number of elements.
    """

    index: int
    in_part: int
    in_shard: int
    size: int


def parts_problem(name: str, parameter: torch.Tensor, parts: list[Part]) -> str | None:
    """Why a state cannot be reassembled for this rank's shard of a parameter; None if it can."""
    box = box_of(parameter)
    try:
        if box.numel and _same(parts, box) is None:
            _plan(parts, box, tuple(parameter.shape))
        for part in parts:
            _class_of(part)
    except ValueError as error:
        return f"{name} cannot be put together for other shards: {error}"
    return None


def assemble_state(
    name: str,
    parameter: torch.Tensor,
    parts: list[Part],
    stored: Mapping[str, StoredTensor],
    folder: StoredFolder,
) -> torch.Tensor:
    """Read a state and reassemble it for this rank's shard of a parameter.

    Args:
        name: Name of the state in the files.
        parameter: The live parameter.
        parts: Parts of the state from the manifest, with which ``parts_problem`` has found no problem.
        stored: Stored tensors by name.
        folder: The files.

    Raises:
        CheckpointMismatchError: If a table of values differs between parts that are to be joined.
    """
    box = box_of(parameter)
    device = parameter.device
    if not box.numel:
        return torch.empty_like(parameter.detach())
    index = _same(parts, box)
    if index is not None:
        inner = {n: _read(f"{name}/{index}/{n}", stored, folder, device) for n in parts[index]["inner"]}
        local = _made(parts[index], inner, box.shape)
    else:
        local = _joined(name, parts, box, tuple(parameter.shape), stored, folder, device)
    if not isinstance(parameter, DTensor):
        return local
    return with_local(parameter, local)


def _same(parts: list[Part], box: Box) -> int | None:
    """Number of the part that is exactly a box; None if there is none."""
    boxes = [(tuple(part["offset"]), tuple(part["shape"])) for part in parts]
    return boxes.index((box.offset, box.shape)) if (box.offset, box.shape) in boxes else None


def _class_of(part: Part) -> Any:
    """The class that a part names, found among imported ones: a name in a file must not import anything."""
    if part["class"] is None:
        return None
    left: list[Any] = [torch.Tensor]
    while left:
        kind = left.pop()
        if f"{kind.__module__}.{kind.__qualname__}" == part["class"]:
            return kind
        left += kind.__subclasses__()
    raise ValueError(
        f"its class {part['class']} is not imported; make the optimizer as it was when it was saved"
    )


def _made(part: Part, inner: dict[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of a part's class and of a shape, made from inner tensors."""
    kind = _class_of(part)
    if kind is None:
        return inner[PLAIN]
    context = _resized(decode(part["context"]), tuple(part["shape"]), shape)
    stride = torch.empty(shape, device="meta").stride()
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, torch.Size(shape), stride)
    return made


def _resized(context: Any, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
    """The context of a part, in which the part's shape is replaced by the shard's wherever it occurs."""
    if isinstance(context, (tuple, list)) and tuple(context) == old and old:
        return type(context)(new)
    if type(context) in (tuple, list):
        return type(context)(_resized(item, old, new) for item in context)
    return context


def _plan(parts: list[Part], box: Box, shape: tuple[int, ...]) -> tuple[list[_Piece], dict[str, int | None]]:
    """The pieces that make up a shard, and how many elements each value of an inner tensor belongs to.

    That number is None for a table of values. Raises ValueError if the parts cannot be joined to the shard.
    """
    pieces = list(_pieces(parts, box, shape))
    first = parts[pieces[0].index]
    used = [parts[piece.index] for piece in pieces]
    if any(part["class"] != first["class"] or part["inner"].keys() != first["inner"].keys() for part in used):
        raise ValueError("its parts are of different kinds")
    blocks = _blocks(first)
    for piece in pieces:
        part = parts[piece.index]
        for inner, block in blocks.items():
            values = math.prod(part["inner"][inner][1])
            if block is None:
                continue
            if values * block != math.prod(part["shape"]):
                raise ValueError(f"its parts have blocks of different sizes in {inner!r}")
            if piece.in_part % block or piece.in_shard % block or piece.size % block:
                raise ValueError(f"its blocks of {block} elements do not end where the shards do")
    return pieces, blocks


def _pieces(parts: list[Part], box: Box, shape: tuple[int, ...]) -> Iterator[_Piece]:
    """The runs of elements of the parts that lie in a shard; both must be whole rows."""
    row = math.prod(shape[1:])
    if box.shape[1:] != shape[1:] or any(tuple(part["shape"][1:]) != shape[1:] for part in parts):
        raise ValueError("it is sharded along another dimension than the first")
    for index, part in enumerate(parts):
        common = box.intersect(Box(tuple(part["offset"]), tuple(part["shape"])))
        if common is not None:
            first = common.offset[0]
            yield _Piece(
                index, (first - part["offset"][0]) * row, (first - box.offset[0]) * row, common.numel
            )


def _blocks(part: Part) -> dict[str, int | None]:
    """Number of elements per value of each inner tensor; None for one that is the same for every shard.

    A tensor of zeros of the part's class is sliced. An inner tensor that shrinks in proportion follows the
    elements; one that does not change is a table. Slices of 1, 2, 4, ... rows are tried until the class
    allows one, since it may refuse slices that cut a block.
    """
    if part["class"] is None:
        return {PLAIN: 1}
    rows = part["shape"][0]
    inner = {n: torch.zeros(shape, dtype=DTYPES[dtype]) for n, (dtype, shape) in part["inner"].items()}
    sample: Any = _made(part, inner, tuple(part["shape"]))
    sizes = [size for size in (2**power for power in range(rows.bit_length())) if size < rows]
    for size in sizes:
        try:
            names, _ = sample[:size].__tensor_flatten__()
            sliced = {n: getattr(sample[:size], n).numel() for n in names}
        except Exception:  # a class may raise anything for a slice that cuts a block
            continue
        return {n: _block(part, n, count, size) for n, count in sliced.items()}
    raise ValueError("its class cannot be cut between rows")


def _numel(part: Part, inner: str) -> int:
    """Number of values in an inner tensor of a part."""
    return math.prod(part["inner"][inner][1])


def _block(part: Part, inner: str, sliced: int, rows: int) -> int | None:
    """Elements per value of an inner tensor of which a slice of ``rows`` rows has kept ``sliced`` values."""
    values, elements = _numel(part, inner), math.prod(part["shape"])
    if sliced == values:
        return None
    if sliced * part["shape"][0] != values * rows or elements % values:
        raise ValueError(f"it cannot be determined which elements the values of {inner!r} belong to")
    return elements // values


def _joined(
    name: str,
    parts: list[Part],
    box: Box,
    shape: tuple[int, ...],
    stored: Mapping[str, StoredTensor],
    folder: StoredFolder,
    device: torch.device,
) -> torch.Tensor:
    """A shard that is none of the parts, joined from runs of their elements."""
    pieces, blocks = _plan(parts, box, shape)
    inner: dict[str, torch.Tensor] = {}
    for n, block in blocks.items():
        keys = [f"{name}/{piece.index}/{n}" for piece in pieces]
        if block is None:
            tables = [_read(key, stored, folder, device) for key in keys]
            if any(not torch.equal(table, tables[0]) for table in tables):
                raise CheckpointMismatchError(f"{name}: {n!r} differs between parts that are to be joined")
            inner[n] = tables[0]
            continue
        flat = torch.cat(
            [
                _read(key, stored, folder, device).reshape(-1)[
                    piece.in_part // block : (piece.in_part + piece.size) // block
                ]
                for key, piece in zip(keys, pieces, strict=True)
            ]
        )
        like_elements = parts[pieces[0].index]["inner"][n][1] == parts[pieces[0].index]["shape"]
        inner[n] = flat.reshape(box.shape) if like_elements else flat
    return _made(parts[pieces[0].index], inner, box.shape)


def _read(
    key: str, stored: Mapping[str, StoredTensor], folder: StoredFolder, device: torch.device
) -> torch.Tensor:
    """A whole stored inner tensor."""
    tensor = stored[key]
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    read_tensors(folder, stored, {key: out})
    return out

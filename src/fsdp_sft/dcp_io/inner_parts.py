"""Optimizer state in tensor subclasses, put together bit by bit from the inner tensors that were stored.

A subclass quantises elements in blocks of its own, so only the same shards can be put together again.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_sft._process.codec import decode
from fsdp_sft._tensors.boxes import Box, box_of, with_local
from fsdp_sft._tensors.stored import StoredFolder
from fsdp_sft.dcp_io.folder import read_tensors
from fsdp_sft.dcp_io.inner_tensors import PLAIN
from fsdp_sft.dcp_io.stored import StoredTensor

Part = dict[str, Any]


def parts_problem(name: str, parameter: torch.Tensor, parts: list[Part]) -> str | None:
    """Why a state cannot be put together for this rank's shard of a parameter; None if it can."""
    box = box_of(parameter)
    if box.numel and _same(parts, box) is None:
        return (
            f"{name} is quantised in the shards of the ranks that saved it, and this rank has another shard: "
            "load it on as many ranks with the same mesh, or begin with a fresh optimizer (optimizer=None)"
        )
    try:
        for part in parts:
            _class_of(part)
    except ValueError as error:
        return f"{name} cannot be put together: {error}"
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
    """
    box = box_of(parameter)
    device = parameter.device
    if not box.numel:
        return torch.empty_like(parameter.detach())
    index = _same(parts, box)
    assert index is not None  # parts_problem has looked
    inner = {n: _read(f"{name}/{index}/{n}", stored, folder, device) for n in parts[index]["inner"]}
    local = _made(parts[index], inner, box.shape)
    return with_local(parameter, local) if isinstance(parameter, DTensor) else local


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
    context = decode(part["context"])
    stride = torch.empty(shape, device="meta").stride()
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, torch.Size(shape), stride)
    return made


def _read(
    key: str, stored: Mapping[str, StoredTensor], folder: StoredFolder, device: torch.device
) -> torch.Tensor:
    """A whole stored inner tensor."""
    tensor = stored[key]
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    read_tensors(folder, stored, {key: out})
    return out

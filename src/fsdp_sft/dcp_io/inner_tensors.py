"""Optimizer state in tensor subclasses, such as 8-bit moments, stored as the tensors inside them.

torch's protocol for such classes takes them apart (``__tensor_flatten__``) and rebuilds them
(``__tensor_unflatten__``). Each rank's part is stored as it is, so the same shards are restored bitwise, and
no others: a class quantises elements in blocks of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.modules import is_wrapper_subclass, local_tensor
from fsdp_sft._process.codec import decode, encode
from fsdp_sft._ranks.agree import agreed, all_gather_objects, this_rank
from fsdp_sft._tensors.boxes import Box, box_of, with_local
from fsdp_sft._tensors.safetensors import DTYPES, dtype_name
from fsdp_sft._tensors.sharding import own_part
from fsdp_sft._tensors.stored import StoredFolder
from fsdp_sft.dcp_io.content import OwnedTensor, Tensors
from fsdp_sft.dcp_io.folder import read_tensors
from fsdp_sft.dcp_io.stored import StoredTensor
from fsdp_sft.errors import UnstorableStateError

PLAIN = "values"  # name of the one inner tensor of a part that is a plain tensor


@dataclass(frozen=True)
class _Part:
    """This rank's part of a state.

    Attributes:
        described: Its entry in the manifest.
        inner: Inner tensors by name.
        writes: Whether this rank writes it.
    """

    described: dict[str, Any]
    inner: dict[str, torch.Tensor]
    writes: bool


def names_to_take_apart(tensors: Tensors) -> list[str]:
    """Names of the states that are in a tensor subclass on this rank."""
    return [name for name, tensor in tensors.items() if is_wrapper_subclass(tensor)]


def flatten_state(
    tensors: Tensors, names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Take apart every state that is in a subclass on some rank.

    Args:
        tensors: State by name, with the same names on all ranks.
        names: Names of the states that are in a subclass on some rank, the same on all ranks.

    Returns:
        (tensors to write, by name; the parts of each state that was taken apart, by name).

    Raises:
        UnstorableStateError: If a subclass does not say what is inside it; raised on all ranks.

    Collective: all ranks.
    """
    parts: dict[str, _Part] = {}
    with agreed("taking the optimizer's state apart"):
        parts = {name: _part(name, tensors[name], index) for index, name in enumerate(names)}
    told = {name: part.described for name, part in parts.items() if part.writes}
    everyone: list[dict[str, dict[str, Any]]] = all_gather_objects(told)
    written: dict[str, Any] = {name: t for name, t in tensors.items() if name not in parts}
    described: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for owner, theirs in enumerate(everyone):
        for name, part in theirs.items():
            for inner, (dtype, shape) in part["inner"].items():
                value = parts[name].inner[inner] if owner == this_rank() else None
                key = f"{name}/{len(described[name])}/{inner}"
                written[key] = OwnedTensor(tuple(shape), DTYPES[dtype], owner, value)
            described[name].append(part)
    return written, described


def take_apart(name: str, tensor: torch.Tensor) -> tuple[str | None, Any, dict[str, torch.Tensor]]:
    """Class, context and inner tensors of this rank's part of a state; no class for a plain tensor.

    Raises:
        UnstorableStateError: If it is of a subclass that does not say what is inside it, or whose inner
            tensors or context cannot be stored.
    """
    local: Any = local_tensor(tensor)
    if not is_wrapper_subclass(local):
        return None, None, {PLAIN: local.detach()}
    kind = type(local)
    if not hasattr(local, "__tensor_flatten__"):
        raise UnstorableStateError(
            f"{name} is a {kind.__name__}, which does not say what is inside it (__tensor_flatten__), so no "
            "checkpoint could hold it: use an optimizer with other state"
        )
    inner_names, context = local.__tensor_flatten__()
    inner = {str(n): getattr(local, n) for n in inner_names}
    nested = [n for n, t in inner.items() if type(t) not in (torch.Tensor, torch.nn.Parameter)]
    if nested:
        raise UnstorableStateError(f"{name} is a {kind.__name__} with subclasses inside it ({nested})")
    try:
        encoded = encode(context, f"what {kind.__name__} says of {name}")
    except TypeError as error:
        raise UnstorableStateError(str(error)) from error
    return f"{kind.__module__}.{kind.__qualname__}", encoded, inner


def _part(name: str, tensor: torch.Tensor, index: int) -> _Part:
    """This rank's part of state number ``index``, which decides which replica writes it."""
    kind, context, inner = take_apart(name, tensor)
    box = box_of(tensor)
    described = {
        "offset": list(box.offset),
        "shape": list(box.shape),
        "class": kind,
        "context": context,
        "inner": {n: [dtype_name(t.dtype), list(t.shape)] for n, t in inner.items()},
    }
    return _Part(described, inner, own_part(tensor, index) is not None)


def inner_names(parts: Mapping[str, list[dict[str, Any]]]) -> set[str]:
    """Names of the stored tensors inside the states that were taken apart."""
    return {
        f"{name}/{index}/{inner}"
        for name, entries in parts.items()
        for index, entry in enumerate(entries)
        for inner in entry["inner"]
    }


def parts_problem(name: str, parameter: torch.Tensor, parts: list[dict[str, Any]]) -> str | None:
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
    parts: list[dict[str, Any]],
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


def _same(parts: list[dict[str, Any]], box: Box) -> int | None:
    """Number of the part that is exactly a box; None if there is none."""
    boxes = [(tuple(part["offset"]), tuple(part["shape"])) for part in parts]
    return boxes.index((box.offset, box.shape)) if (box.offset, box.shape) in boxes else None


def _class_of(part: dict[str, Any]) -> Any:
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


def _made(part: dict[str, Any], inner: dict[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
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

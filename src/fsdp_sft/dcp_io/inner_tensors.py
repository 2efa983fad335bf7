"""Optimizer state in tensor subclasses, such as 8-bit moments, stored as the tensors inside them.

torch's protocol for such classes takes them apart (``__tensor_flatten__``) and rebuilds them
(``__tensor_unflatten__``). Each rank's part is stored as it is, so the same shards are restored bitwise, and
no others: a class quantises elements in blocks of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.fsdp import sharded_as
from fsdp_sft._compat.modules import is_wrapper_subclass, local_tensor
from fsdp_sft._process.codec import decode, encode
from fsdp_sft._ranks.agree import agreed, all_gather_objects, this_rank
from fsdp_sft._tensors.boxes import Box, box_of, whole
from fsdp_sft._tensors.safetensors import DTYPES, dtype_name
from fsdp_sft._tensors.sharding import Sharding, own_part
from fsdp_sft._tensors.stored import StoredFolder
from fsdp_sft.dcp_io.folder import read_tensors
from fsdp_sft.dcp_io.parts import Part, StoredTensor, file_key
from fsdp_sft.errors import UnstorableStateError

_PLAIN = "values"  # name of the one inner tensor of a part that is a plain tensor


def inner_parts(
    states: Mapping[str, torch.Tensor], names: Sequence[str]
) -> tuple[dict[str, StoredTensor], list[Part], dict[str, list[dict[str, Any]]]]:
    """Take apart every state that is in a subclass on some rank.

    Args:
        states: State by name, with the same names on all ranks.
        names: Names of the states that are in a subclass on some rank, the same on all ranks.

    Returns:
        (the tensors inside, by name; what this rank writes; the parts of each state, for the manifest).

    Raises:
        UnstorableStateError: If a subclass does not say what is inside it; raised on all ranks.

    Collective: all ranks.
    """
    own: dict[str, dict[str, Any]] = {}
    inner: dict[str, dict[str, torch.Tensor]] = {}
    with agreed("taking the optimizer's state apart"):
        for index, name in enumerate(names):
            kind, context, inner[name] = take_apart(name, states[name])
            if own_part(states[name], index) is not None:  # else another replica writes it
                box = box_of(states[name])
                described = {n: [dtype_name(t.dtype), list(t.shape)] for n, t in inner[name].items()}
                place = {"offset": list(box.offset), "shape": list(box.shape)}
                own[name] = {**place, "class": kind, "context": context, "inner": described}
    stored: dict[str, StoredTensor] = {}
    written: list[Part] = []
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for owner, theirs in enumerate(all_gather_objects(own)):
        for name, part in theirs.items():
            for leaf, (dtype, shape) in part["inner"].items():
                key = f"{name}/{len(parts[name])}/{leaf}"
                file = file_key("optimizer", key)
                stored[key] = StoredTensor(
                    tuple(shape), DTYPES[dtype], file, Sharding((1,), (owner,), splits=())
                )
                if owner == this_rank() and 0 not in shape:
                    written.append(Part(file, whole(shape), inner[name][leaf].detach(), tuple(shape)))
            parts[name].append(part)
    return stored, written, parts


def take_apart(name: str, tensor: torch.Tensor) -> tuple[str | None, Any, dict[str, torch.Tensor]]:
    """Class, context and inner tensors of this rank's part of a state; no class for a plain tensor.

    Raises:
        UnstorableStateError: If it is of a subclass that does not say what is inside it, or whose inner
            tensors or context cannot be stored.
    """
    local: Any = local_tensor(tensor)
    if not is_wrapper_subclass(local):
        return None, None, {_PLAIN: local.detach()}
    kind = type(local)
    if not hasattr(local, "__tensor_flatten__"):
        raise UnstorableStateError(
            f"{name} is a {kind.__name__}, which does not say what is inside it (__tensor_flatten__), so no "
            "checkpoint could hold it: use an optimizer with other state"
        )
    names, context = local.__tensor_flatten__()
    inner = {str(n): getattr(local, n) for n in names}
    nested = [n for n, t in inner.items() if type(t) not in (torch.Tensor, torch.nn.Parameter)]
    if nested:
        raise UnstorableStateError(f"{name} is a {kind.__name__} with subclasses inside it ({nested})")
    try:
        encoded = encode(context, f"what {kind.__name__} says of {name}")
    except TypeError as error:
        raise UnstorableStateError(str(error)) from error
    return f"{kind.__module__}.{kind.__qualname__}", encoded, inner


def parts_problem(name: str, parameter: torch.Tensor, parts: list[dict[str, Any]]) -> str | None:
    """Why a state cannot be put together for this rank's shard of a parameter; None if it can."""
    box = box_of(parameter)
    if box.numel and box not in map(_box_in, parts):
        return (
            f"{name} is quantised in the shards of the ranks that saved it, and this rank has another shard: "
            "load it on as many ranks with the same mesh, or begin with a fresh optimizer (optimizer=None)"
        )
    unknown = {part["class"] for part in parts} - {None, *_imported()}
    if unknown:
        return (
            f"{name} cannot be put together: its class {unknown.pop()} is not imported; make the optimizer "
            "as it was when it was saved"
        )
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
    if not box.numel:
        return torch.empty_like(parameter.detach())
    index = [_box_in(part) for part in parts].index(box)
    part, device = parts[index], parameter.device
    sources = {leaf: stored[f"{name}/{index}/{leaf}"] for leaf in part["inner"]}
    inner = {n: torch.empty(t.shape, dtype=t.dtype, device=device) for n, t in sources.items()}
    read_tensors(folder, sources, inner)
    if part["class"] is None:
        local = inner[_PLAIN]
    else:
        like = torch.empty(box.shape, device="meta")
        kind, context = _imported()[part["class"]], decode(part["context"])
        local = kind.__tensor_unflatten__(inner, context, like.shape, like.stride())
    return sharded_as(parameter, local, parameter.shape) if isinstance(parameter, DTensor) else local


def _box_in(part: Mapping[str, Any]) -> Box:
    """The box of the full state that a part is."""
    return Box(tuple(part["offset"]), tuple(part["shape"]))


def _imported() -> dict[str, Any]:
    """The imported subclasses of tensors by name: a name in a file must not import anything."""
    found: dict[str, Any] = {}
    left: list[Any] = [torch.Tensor]
    while left:
        kind = left.pop()
        found.setdefault(f"{kind.__module__}.{kind.__qualname__}", kind)
        left += kind.__subclasses__()
    return found

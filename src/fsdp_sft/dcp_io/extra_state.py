"""Extra state, which modules return from ``get_extra_state``, as JSON and tensors, the same on all ranks."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp_sft._model.state import ModelTensors
from fsdp_sft._process.codec import dumps, encode
from fsdp_sft._tensors.boxes import local_of
from fsdp_sft._tensors.safetensors import bytes_of
from fsdp_sft.dcp_io.content import FolderContent
from fsdp_sft.errors import CheckpointError, CheckpointMismatchError, UnstorableStateError, abridged


def encode_extra(model: ModelTensors) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Extra state as JSON by name, and the tensors to which the JSON refers by their key paths.

    Raises:
        UnstorableStateError: If a value can be stored in neither way; the message names the module.
    """
    tensors: dict[str, torch.Tensor] = {}
    encoded = {}
    for name, value in model.extra.items():
        try:
            encoded[name] = encode(value, name, tensors)
        except TypeError as error:
            raise UnstorableStateError(
                f"get_extra_state of {name.rpartition('.')[0] or 'the model'} cannot be stored: {error}; "
                "files hold no pickle"
            ) from error
    return encoded, tensors


def digests(encoded: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of each encoded value and of this rank's part of each tensor, by name."""
    found = {name: _digest(dumps(value)) for name, value in encoded.items()}
    for name, tensor in tensors.items():
        found[f"{name} as a tensor"] = _digest(bytes_of(local_of(tensor).cpu().contiguous()))
    return found


def own_digests(content: FolderContent) -> dict[str, str]:
    """Digests of everything that modules have made for a model's state dict, as this rank has it."""
    model = content.model
    made = {name: model.tensors[name] for name in model.made} if model is not None else {}
    return digests(content.extra, {**content.extra_tensors, **made})


def check_alike(everyone: Sequence[Mapping[str, str]]) -> None:
    """Refuse state that differs between ranks, since one rank's would be stored for all.

    Args:
        everyone: Digests of each rank, in rank order.

    Raises:
        CheckpointError: If some digests differ.
    """
    names = set().union(*everyone)
    differing = {name for name in names if len({own.get(name) for own in everyone}) > 1}
    if differing:
        raise CheckpointError(
            f"the modules' own state differs between ranks: {abridged(differing)}. One value is stored for "
            "all; what belongs to a rank goes into rank_state"
        )


def check_extra(saved: Mapping[str, Any], live: ModelTensors) -> None:
    """Compare the names of saved extra state with those of a model's.

    Raises:
        CheckpointMismatchError: If they differ.
    """
    if saved.keys() != live.extra.keys():
        raise CheckpointMismatchError(
            "the checkpoint is of another model: extra state of modules is only in the checkpoint "
            f"({abridged(saved.keys() - live.extra.keys())}) or only in the model "
            f"({abridged(live.extra.keys() - saved.keys())})"
        )


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()

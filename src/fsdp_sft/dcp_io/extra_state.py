"""What modules return from ``get_extra_state``: as JSON and tensors, the same on all ranks."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp_sft._boxes import local_of
from fsdp_sft._model import ModelTensors
from fsdp_sft._safetensors import bytes_of
from fsdp_sft.dcp_io.codec import decode, dumps, encode
from fsdp_sft.errors import CheckpointError, CheckpointMismatchError, UnstorableStateError, abridged


def encode_extra(model: ModelTensors) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Name to JSON, and the tensors that it refers to by their key paths.

    Raises:
        UnstorableStateError: If a value is neither; names the module.
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
    """What was encoded and tensors that every rank has whole, each as the SHA-256 of its bytes."""
    found = {name: _digest(dumps(value)) for name, value in encoded.items()}
    for name, tensor in tensors.items():
        found[f"{name} as a tensor"] = _digest(bytes_of(local_of(tensor).cpu().contiguous()))
    return found


def own_digests(model: ModelTensors) -> dict[str, str]:
    """Of all that a model's modules have made for its state dict, this rank's part of it.

    Raises:
        UnstorableStateError: As ``encode_extra`` does.
    """
    return digests(*encode_extra(model)) | digests({}, {name: model.tensors[name] for name in model.made})


def check_alike(everyone: Sequence[Mapping[str, str]]) -> None:
    """Refuse what differs between ranks: one of them would be stored for all.

    Args:
        everyone: Digests of each rank.

    Raises:
        CheckpointError: If some differ.
    """
    names = set().union(*everyone)
    differing = {name for name in names if len({own.get(name) for own in everyone}) > 1}
    if differing:
        raise CheckpointError(
            f"the modules' own state differs between ranks: {abridged(differing)}. One value is stored for "
            "all; what belongs to a rank goes into rank_state"
        )


def check_extra(saved: Mapping[str, Any], live: ModelTensors) -> None:
    """Compare the names of saved extra state with those of a model.

    Raises:
        CheckpointMismatchError: If they differ.
    """
    if saved.keys() != live.extra.keys():
        raise CheckpointMismatchError(
            "the checkpoint is of another model: extra state of modules is only in the checkpoint "
            f"({abridged(saved.keys() - live.extra.keys())}) or only in the model "
            f"({abridged(live.extra.keys() - saved.keys())})"
        )


def decode_extra(saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The values, for ``set_extra_state``."""
    return {name: decode(value, tensors) for name, value in saved.items()}


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()

"""Packed weights in a step: they do not change, so it names what they were packed of instead."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from fsdp_sft._model.record import kept_of
from fsdp_sft._model.state import ModelTensors, model_tensors
from fsdp_sft._model.wrappers import base_of
from fsdp_sft._process.codec import MALFORMED, dumps, loads
from fsdp_sft._tensors.boxes import local_of
from fsdp_sft._tensors.disk import read_bytes
from fsdp_sft._tensors.packed_shard import PackedShard
from fsdp_sft.dcp_io.manifest import MAX_JSON_BYTES, Manifest
from fsdp_sft.errors import CheckpointCorruptError, CheckpointMismatchError
from fsdp_sft.shard.packing import PackedDigest

NAME = "packed.json"  # below settings/


def stored_tensors(model: nn.Module) -> ModelTensors:
    """The model's tensors but for those that are packed."""
    content = model_tensors(model)
    packed = {name for name, tensor in content.tensors.items() if isinstance(local_of(tensor), PackedShard)}
    if not packed:
        return content
    return replace(
        content,
        names={name: first for name, first in content.names.items() if first not in packed},
        tensors={name: tensor for name, tensor in content.tensors.items() if name not in packed},
        frozen=[name for name in content.frozen if name not in packed],
    )


def packed_settings(model: nn.Module) -> dict[str, bytes]:
    """Content of ``packed.json``, by the file's name; empty if nothing is packed.

    ``packed_digest`` must have been called.
    """
    found = kept_of(base_of(model), PackedDigest)
    return {} if found is None else {NAME: dumps({"kind": found.kind, "digest": found.digest})}


def check_packed(folder: Path, manifest: Manifest, model: nn.Module) -> None:
    """Refuse a model whose packed weights are not those with which a step was trained.

    ``packed_digest`` must have been called.

    Raises:
        CheckpointMismatchError: If they are not; the message says how they were packed.
        CheckpointCorruptError: If the file is not what was written.
    """
    source, path = kept_of(base_of(model), PackedDigest), folder / "settings" / NAME
    if f"settings/{NAME}" not in manifest.files:
        if source is not None:
            raise CheckpointMismatchError(
                f"{folder} has all weights of its model, none of them packed: build the model with a dtype "
                f"for frozen_dtype, and not {source.kind!r}"
            )
        return
    try:
        saved = dict(loads(read_bytes(path, MAX_JSON_BYTES), NAME))
    except MALFORMED as error:
        raise CheckpointCorruptError(f"{path} is not what was written: {error}") from None
    own = None if source is None else {"kind": source.kind, "digest": source.digest}
    if saved != own:
        how = f"packed as {saved.get('kind')!r:.20}"
        raise CheckpointMismatchError(
            f"{folder} was trained on a base {how} that it does not have, and this model has another: load "
            f"that base with frozen_dtype={saved.get('kind')!r:.20}, from the same files"
        )

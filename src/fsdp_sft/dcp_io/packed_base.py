"""Packed weights in a step: they do not change, so it names what they were packed of, or has their bytes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.fsdp import adopt_shards, sharded_as
from fsdp_sft._model.adapters import without_adapters
from fsdp_sft._model.record import kept_of
from fsdp_sft._model.state import ModelTensors, model_tensors
from fsdp_sft._model.wrappers import base_of
from fsdp_sft._process.codec import MALFORMED, dumps, loads
from fsdp_sft._quantised.recipes import RECIPES
from fsdp_sft._tensors.boxes import local_of
from fsdp_sft._tensors.disk import read_bytes
from fsdp_sft._tensors.packed_shard import PackedLayout, PackedShard
from fsdp_sft.dcp_io.manifest import MAX_JSON_BYTES, Manifest
from fsdp_sft.errors import CheckpointCorruptError, CheckpointMismatchError, abridged
from fsdp_sft.shard.packing import PackedDigest, empty_shard, layout_of, packed_weights, put_packed

NAME = "packed.json"  # below settings/


def stored_tensors(model: nn.Module, *, with_base: bool = False) -> ModelTensors:
    """The model's tensors; of those that are packed none, or their bytes.

    The bytes are a tensor of uint8 in the shard's memory, with a row for each index of the first dimension.
    """
    content = model_tensors(model)
    packed = _packed(content)
    if with_base:
        rows: dict[str, torch.Tensor] = {name: _bytes_of(*found) for name, found in packed.items()}
        return replace(content, tensors={**content.tensors, **rows})
    return replace(
        content,
        names={name: first for name, first in content.names.items() if first not in packed},
        tensors={name: tensor for name, tensor in content.tensors.items() if name not in packed},
        frozen=[name for name in content.frozen if name not in packed],
    )


def _packed(content: ModelTensors) -> dict[str, tuple[DTensor, PackedShard]]:
    """(parameter, shard) of what is packed, by name."""
    found: dict[str, tuple[DTensor, PackedShard]] = {}
    for name, tensor in content.tensors.items():
        if isinstance(tensor, DTensor) and isinstance(local := local_of(tensor), PackedShard):
            found[name] = (tensor, local)
    return found


def _bytes_of(parameter: DTensor, shard: PackedShard) -> torch.Tensor:
    width = shard.lies.rows_each * shard.lies.form.row_bytes
    rows = shard.own_rows.view(shard.count, width)
    made: DTensor = sharded_as(parameter, rows, (parameter.shape[0], width))
    return made


def _form_of(layout: PackedLayout) -> list[Any]:
    """What must be the same for the bytes of one weight to be those of another."""
    form = layout.form
    parts = [[name, str(dtype).removeprefix("torch."), count] for name, dtype, count in form.parts]
    return [form.name, form.width, layout.transposed, parts]


def packed_settings(model: nn.Module, *, with_base: bool) -> dict[str, bytes]:
    """Content of ``packed.json``, by the file's name; empty if nothing is packed.

    ``packed_digest`` must have been called.
    """
    found = kept_of(base_of(model), PackedDigest)
    if found is None:
        return {}
    told: dict[str, Any] = {"kind": found.kind, "digest": found.digest}
    if with_base:
        packed = _packed(model_tensors(model, values=False))
        told["forms"] = {name: _form_of(shard.lies) for name, (_, shard) in packed.items()}
    return {NAME: dumps(told)}


def check_packed(folder: Path, manifest: Manifest, model: nn.Module) -> bool:
    """Refuse a model whose packed weights are not those with which a step was trained, and cannot become it.

    ``packed_digest`` must have been called. Weights that are to be packed as the step has them, and have only
    memory so far, become packed.

    Returns:
        Whether the step has the bytes of its base.

    Raises:
        CheckpointMismatchError: If they are not; the message says how they were packed.
        CheckpointCorruptError: If the file is not what was written.
    """
    source, path = kept_of(base_of(model), PackedDigest), folder / "settings" / NAME
    weights = packed_weights(model)
    if f"settings/{NAME}" not in manifest.files:
        if source is not None:
            raise CheckpointMismatchError(
                f"{folder} has all weights of its model, none of them packed: build the model with a dtype "
                f"for frozen_dtype, and not {source.kind!r}"
            )
        return False
    try:
        saved = dict(loads(read_bytes(path, MAX_JSON_BYTES), NAME))
        kind, forms = str(saved["kind"]), saved.get("forms")
        forms = None if forms is None else {str(name): list(form) for name, form in dict(forms).items()}
    except (*MALFORMED, KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{path} is not what was written: {error}") from None
    if forms is not None:
        if weights is None or weights.kind != kind:
            raise CheckpointMismatchError(
                f"{folder} has its base packed as {kind!r:.20}: build this model with that frozen_dtype"
            )
        _make_room(model)
        _check_forms(folder, model, forms)
        return True
    own = None if source is None else {"kind": source.kind, "digest": source.digest}
    if {"kind": kind, "digest": saved.get("digest")} != own:
        raise CheckpointMismatchError(
            f"{folder} was trained on a base packed as {kind!r:.20} that it does not have, and this model "
            f"has another: load that base with frozen_dtype={kind!r:.20}, from the same files"
        )
    return False


def _make_room(model: nn.Module) -> None:
    """Shards for weights that are to be packed by a recipe and have no values yet."""
    weights = packed_weights(model)
    assert weights is not None
    made = False
    with without_adapters(model) as base:
        for name in sorted(weights.names) if weights.kind in RECIPES else ():
            parameter = base.get_parameter(name)
            local = local_of(parameter)
            if isinstance(parameter, DTensor) and not (local.is_meta or isinstance(local, PackedShard)):
                form = RECIPES[weights.kind].form(parameter.shape[-1])
                layout = layout_of(parameter, form, transposed=False)
                put_packed(base, name, empty_shard(parameter, layout, local.device))
                made = True
    if made:
        adopt_shards(model)


def _check_forms(folder: Path, model: nn.Module, forms: Mapping[str, list[Any]]) -> None:
    own = {name: _form_of(shard.lies) for name, (_, shard) in _packed(model_tensors(model)).items()}
    apart = sorted(name for name in {*own, *forms} if own.get(name) != forms.get(name))
    if apart:
        raise CheckpointMismatchError(
            f"{folder} has a base that is packed otherwise than this model's ({abridged(apart)}): load this "
            "model's base from the same kind of checkpoint before the step"
        )


def note_new_bytes(model: nn.Module) -> None:
    """Let it be noticed that the bytes of packed weights have been read: reads alone say nothing."""
    for _, shard in _packed(model_tensors(model, values=False)).values():
        torch.autograd.graph.increment_version(shard.rows)

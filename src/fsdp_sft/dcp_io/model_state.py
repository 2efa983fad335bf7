"""The model in a checkpoint: comparing it with the live model, and reading it."""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.fsdp import adopt_shards, sharded_as
from fsdp_sft._model.adapters import without_adapters
from fsdp_sft._model.record import kept_of, record_of
from fsdp_sft._model.state import ModelTensors, match_tensors, model_tensors
from fsdp_sft._model.wrappers import base_of, unwrapped
from fsdp_sft._process.codec import MALFORMED, dumps, loads
from fsdp_sft._quantised.recipes import RECIPES
from fsdp_sft._tensors.boxes import local_of
from fsdp_sft._tensors.disk import read_bytes
from fsdp_sft._tensors.packed_shard import PackedLayout, PackedShard
from fsdp_sft.dcp_io.folder import check_files
from fsdp_sft.dcp_io.manifest import MAX_JSON_BYTES, Manifest
from fsdp_sft.dcp_io.stored import StoredTensor
from fsdp_sft.errors import CheckpointCorruptError, CheckpointMismatchError, abridged
from fsdp_sft.shard.packing import PackedDigest, empty_shard, layout_of, packed_weights, put_packed

# Names of modules that have a row for each token of the vocabulary.
_VOCABULARY = re.compile(r"(?:^|\.)(?:\w*embed\w*|wte|lm_head|output)(?:\.|$)")


def check_model(manifest: Manifest, live: ModelTensors) -> dict[str, StoredTensor]:
    """The stored tensor for each tensor of the model, by the model's first name.

    Raises:
        CheckpointMismatchError: If names, ties, shapes or dtypes differ.
        CheckpointCorruptError: If a file that this rank will read is not listed in the manifest.
    """
    stored = manifest.model or {}
    first_stored = {**{name: name for name in stored}, **manifest.ties}
    described = {name: (stored[first].dtype, stored[first].shape) for name, first in first_stored.items()}
    found, problems = match_tensors(live, described, operator.eq)
    sources: dict[str, StoredTensor] = {}
    read_by: dict[str, str] = {}  # the model's tensor of each stored one
    for first, names in found.items():
        for source in {first_stored[name]: None for name in names}:
            if sources.setdefault(first, stored[source]) is not stored[source]:
                problems.append(f"{first} is tied to {source} in the model but not in the checkpoint")
            if read_by.setdefault(source, first) != first:
                other = read_by[source]
                problems.append(f"{first} is tied to {other} in the checkpoint but not in the model")
    if problems:
        rows = _other_vocabulary(sources, live, found, len(problems))
        advice = f"; load the model with new_vocab_size={rows}" if rows is not None else ""
        raise CheckpointMismatchError(
            "the checkpoint is of another model: " + abridged(problems, "; ") + advice
        )
    check_files(manifest, sources, {name: live.tensors[name] for name in sources})
    return sources


def _other_vocabulary(
    sources: Mapping[str, StoredTensor],
    live: ModelTensors,
    found: Mapping[str, list[str]],
    num_problems: int,
) -> int | None:
    """Rows of the stored embedding and head, if their number is all that differs; else None."""
    pairs = [(name, tuple(live.tensors[name].shape), stored) for name, stored in sources.items()]
    other = [pair for pair in pairs if pair[1] != pair[2].shape]
    rows = {(shape[:1], stored.shape[:1]) for _, shape, stored in other}
    is_all = len(rows) == 1 and sum(len(found[name]) for name, _, _ in other) == num_problems
    if not is_all or not all(
        _VOCABULARY.search(name)
        and shape[1:] == stored.shape[1:]
        and live.tensors[name].dtype == stored.dtype
        for name, shape, stored in other
    ):
        return None
    return other[0][2].shape[0]


# A step's record of its adapters, by which a resume with other adapters is refused.

ADAPTERS_NAME = "adapters.json"  # below settings/
# Fields of peft's config that do not change an adapter's product (what it contributes to a layer): names,
# training, initialisation, and the layers, which tensor names show. AdaLora changes its ranks by itself.
_NOT_OF_THE_PRODUCT = re.compile(
    r"base_model_name_or_path|revision|inference_mode|task_type|auto_mapping|peft_version|.*dropout.*|init_.*"
    r"|.*_init|(ex|in)?clude_modules|target_.*|modules_to_save|layers_.*|.*_layers|bias|save_projection"
    r"|trainable_.*|ensure_.*|monteclora_.*|runtime_config|loftq_.*|eva_.*|corda_.*|lora_ga_.*|megatron_.*"
    r"|total_step|tinit|tfinal|delta[tT]|beta\d|orth_reg_weight|fan_in_fan_out"
)
_OF_ADALORA = ("rank_pattern", "r")


def adapter_settings(model: nn.Module) -> dict[str, bytes]:
    """Content of ``adapters.json``, by the file's name; empty if the model has no adapters."""
    told = _told(model)
    return {ADAPTERS_NAME: dumps(told)} if told else {}


def check_adapters(folder: Path, manifest: Manifest, model: nn.Module) -> None:
    """Refuse a model whose adapters would compute another product from a step's weights.

    Raises:
        CheckpointMismatchError: If a setting of an adapter differs.
        CheckpointCorruptError: If the file is not what was written.
    """
    if f"settings/{ADAPTERS_NAME}" not in manifest.files:  # without adapters
        return
    path = folder / "settings" / ADAPTERS_NAME
    try:
        saved = loads(read_bytes(path, MAX_JSON_BYTES), ADAPTERS_NAME)
        own = {name: each for name, each in _told(model).items() if name in saved}
        apart = [
            f"{key}={saved[name].get(key)!r} in the step and {each.get(key)!r} in the model, "
            f"of adapter {name!r}"
            for name, each in own.items()
            for key in sorted({*saved[name], *each})
            if saved[name].get(key) != each.get(key)
        ]
    except MALFORMED as error:
        raise CheckpointCorruptError(f"{path} is not what was written: {error}") from None
    if apart:
        raise CheckpointMismatchError(
            f"{folder} holds other adapters than the model has: {'; '.join(apart)}. Put them in with the "
            "config of the run that saved it"
        )


def _told(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Settings that determine each adapter's product, by adapter, as JSON values."""
    configs: Any = getattr(unwrapped(model), "peft_config", None)
    if not isinstance(configs, dict):
        return {}
    return {str(name): _of_the_product(config) for name, config in configs.items()}


def _of_the_product(config: Any) -> dict[str, Any]:
    """Numbers, strings, flags and patterns of one adapter's config that its product may depend on."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    plain = {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, (str, int, float, dict)) and not _NOT_OF_THE_PRODUCT.fullmatch(key)
    }
    left_out = _OF_ADALORA if kind == "ADALORA" else ()
    told = {key: value for key, value in plain.items() if value not in ({}, False) and key not in left_out}
    return {**told, "peft_type": kind}


# Packed weights in a step: they do not change, so it names what they were packed of, or has their bytes.

PACKED_NAME = "packed.json"  # below settings/


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
    return {PACKED_NAME: dumps(told)}


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
    source, path = kept_of(base_of(model), PackedDigest), folder / "settings" / PACKED_NAME
    weights = packed_weights(model)
    if f"settings/{PACKED_NAME}" not in manifest.files:
        if source is not None:
            raise CheckpointMismatchError(
                f"{folder} has all weights of its model, none of them packed: build the model with a dtype "
                f"for frozen_dtype, and not {source.kind!r}"
            )
        return False
    try:
        saved = dict(loads(read_bytes(path, MAX_JSON_BYTES), PACKED_NAME))
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


# The record of the step that a model was loaded from, with or without the optimizer saved with it.


@dataclass
class _Loaded:
    """Number of the step, and whether its optimizer was loaded too; None if none was saved."""

    step: int
    with_optimizer: bool | None


def note_optimizer(model: nn.Module, step: int, *, loaded: bool | None) -> None:
    """Record whether a step was loaded with its optimizer; ``loaded`` is None if it has none."""
    record_of(model).keep(_Loaded(step, loaded))


def loaded_without_optimizer(model: nn.Module) -> int | None:
    """Number of the step that a model was loaded from without its optimizer; None if there is none."""
    known = kept_of(model, _Loaded)
    return known.step if known is not None and known.with_optimizer is False else None


def resumed_with_optimizer(model: nn.Module) -> int | None:
    """Number of the step that a model was loaded from with its optimizer; None if there is none."""
    known = kept_of(model, _Loaded)
    return known.step if known is not None and known.with_optimizer else None

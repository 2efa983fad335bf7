"""The model in a checkpoint: comparing it with the live model, and reading it."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.fsdp import sharded_as
from fsdp_sft._model.published import (
    ModelTensors,
    match_tensors,
    model_tensors,
    recorded_settings,
    refuse_merged,
    settings_apart,
)
from fsdp_sft._model.view import base_of, clean_name, kept_of
from fsdp_sft._tensors.boxes import box_of, local_of
from fsdp_sft._tensors.packed_shard import PackedShard
from fsdp_sft._tensors.sharding import own_part
from fsdp_sft.dcp_io.manifest import Manifest
from fsdp_sft.dcp_io.parts import StoredTensor
from fsdp_sft.errors import CheckpointMismatchError, abridged
from fsdp_sft.shard.packing import PackedWeights, pack_loaded, packed_weights


def match_model(
    folder: Path, manifest: Manifest, model: nn.Module, base: dict[str, str] | None
) -> tuple[dict[str, torch.Tensor], dict[str, StoredTensor]]:
    """The tensors of a model that a step has values for, and the stored tensor of each, by its first name.

    Args:
        folder: Folder of the step, for messages.
        manifest: Its manifest.
        model: The model, as ``reshard`` returned it.
        base: As for ``stored_model``.

    Raises:
        CheckpointMismatchError: If names, ties, shapes, dtypes, settings or packed weights differ.
        UnsupportedModelError: As ``model_tensors`` does.
    """
    refuse_merged(model, "loading a checkpoint")
    apart = settings_apart(manifest.settings, recorded_settings(model))
    if apart:
        raise CheckpointMismatchError(f"{folder} holds {apart}")
    has_base = check_packed(folder, manifest, model, base)
    live, _ = stored_model(model_tensors(model), base, with_base=has_base)
    first_stored = {**{name: name for name in manifest.model}, **manifest.ties}
    stored = {name: manifest.model[first] for name, first in first_stored.items()}
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    found, problems = match_tensors(live, described, casts=False)
    sources: dict[str, StoredTensor] = {}
    read_by: dict[str, str] = {}  # the model's tensor of each stored one
    for first, names in found.items():
        for name in names:
            source = first_stored[name]
            if sources.setdefault(first, stored[name]) is not stored[name]:
                problems.append(f"{first} is tied to {source} in the model but not in the checkpoint")
            if read_by.setdefault(source, first) != first:
                problems.append(
                    f"{first} is tied to {read_by[source]} in the checkpoint but not in the model"
                )
    if problems:
        raise CheckpointMismatchError("the checkpoint is of another model: " + abridged(problems, "; "))
    return live.tensors, sources


# Packed weights in a step: they do not change, so it names what they were packed of, or has their bytes.

PACKED = "packed"
_MODULUS = 1 << 42  # a power of two, as sums wrap around at one
_WORDS_AT_ONCE = 1 << 20


class PackedBase(NamedTuple):
    """How a model's frozen weights are packed.

    Attributes:
        kind: ``"stored"``, or the name of a recipe; None if none is packed.
        formats: Format of the rows of each weight, by its name.
        sums: Sums over the bytes of this rank's rows, in the same order.
    """

    kind: str | None
    formats: dict[str, str]
    sums: list[int]

    def fingerprint(self, totals: Iterable[int]) -> dict[str, str] | None:
        """``kind``, and ``digest``: SHA-256 of ``totals``, the same on any number of ranks."""
        each = [
            [name, form, n % _MODULUS] for (name, form), n in zip(self.formats.items(), totals, strict=True)
        ]
        digest = hashlib.sha256(json.dumps([self.kind, each]).encode()).hexdigest()
        return None if self.kind is None else {"kind": self.kind, "digest": digest}


def packed_base(model: nn.Module) -> PackedBase:
    """How a model's frozen weights are packed."""
    base = base_of(model)
    weights = kept_of(base, PackedWeights)
    named = {clean_name(name): parameter for name, parameter in base.named_parameters()}
    shards = _packed(named)
    return PackedBase(
        weights.kind if weights is not None and shards else None,
        {name: shard.format for name, (_, shard) in shards.items()},
        [0 if own_part(p) is None else _sum(p, shard) for p, shard in shards.values()],
    )


def total_sums(everyone: Iterable[list[int]]) -> list[int]:
    """``PackedBase.sums`` of all ranks together."""
    return [sum(own) for own in zip(*everyone, strict=True)]


def refuse_packed(model: nn.Module, source: Path) -> None:
    """Refuse to load a file of whole weights into a model of which some are packed."""
    if packed_weights(model) is not None:
        raise CheckpointMismatchError(
            f"{source} cannot be loaded into a model whose frozen weights are packed: build it with a dtype "
            "for frozen_dtype, or resume a step of save_checkpoint"
        )


def _sum(parameter: DTensor, shard: PackedShard) -> int:
    """The bytes of this rank's rows, each word weighted by its place in the whole parameter."""
    words = shard.own_rows.view(torch.int32)
    first, device, total = box_of(parameter).offset[0] * shard.lies.rows_each, words.device, 0
    across = torch.arange(words.shape[1], device=device) * 2654435761 * 2 + 1
    for begin in range(0, len(words), step := max(1, _WORDS_AT_ONCE // words.shape[1])):
        some = words[begin : begin + step].to(torch.int64)
        down = (torch.arange(len(some), device=device) + first + begin) * 40503 * 2 + 1
        total += int(((some * across).sum(1) * down).sum()) % _MODULUS  # integers that overflow wrap around
    return total % _MODULUS


def stored_model(
    content: ModelTensors,
    base: dict[str, str] | None,
    *,
    with_base: bool = False,
) -> tuple[ModelTensors, dict[str, dict[str, Any]]]:
    """What a step has of a model.

    Args:
        content: The model's tensors.
        base: What ``fingerprint`` of a ``PackedBase`` returned.
        with_base: Whether the bytes of packed weights are wanted. They are tensors of uint8 in the shards'
            memory, with a row for each index of the first dimension.

    Returns:
        (its tensors, without packed ones or with their bytes; its settings and what is packed, see
        ``Manifest``).
    """
    packed, settings = _packed(content.tensors), dict(content.settings)
    if base is not None:
        settings[PACKED] = dict(base)
    if with_base:
        rows: dict[str, torch.Tensor] = {}
        for name, (parameter, shard) in packed.items():
            own = shard.own_rows.view(shard.count, shard.lies.rows_each * shard.lies.form.row_bytes)
            rows[name] = sharded_as(parameter, own, (parameter.shape[0], own.shape[1]))
        if base is not None:
            settings[PACKED]["forms"] = _forms(packed)
        return replace(content, tensors={**content.tensors, **rows}), settings
    return replace(
        content,
        names={name: first for name, first in content.names.items() if first not in packed},
        tensors={name: tensor for name, tensor in content.tensors.items() if name not in packed},
    ), settings


def _packed(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[DTensor, PackedShard]]:
    """(parameter, shard) of what is packed, by name."""
    found: dict[str, tuple[DTensor, PackedShard]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and isinstance(local := local_of(tensor), PackedShard):
            found[name] = (tensor, local)
    return found


def _forms(packed: Mapping[str, tuple[DTensor, PackedShard]]) -> dict[str, list[Any]]:
    """What must be the same, of each weight, for the bytes of one to be those of another."""
    forms = {}
    for name, (_, shard) in packed.items():
        form = shard.lies.form
        parts = [[part, str(dtype).removeprefix("torch."), count] for part, dtype, count in form.parts]
        forms[name] = [form.name, form.width, shard.lies.transposed, parts]
    return forms


def check_packed(folder: Path, manifest: Manifest, model: nn.Module, base: dict[str, str] | None) -> bool:
    """Refuse a model whose packed weights are not those with which a step was trained, and cannot become it.

    Weights that are to be packed as the step has them, and have only memory so far, become packed.

    Args:
        folder: Folder of the step, for messages.
        manifest: Its manifest.
        model: The model, as ``reshard`` returned it.
        base: As for ``stored_model``.

    Returns:
        Whether the step has the bytes of its base.

    Raises:
        CheckpointMismatchError: If they are not; the message says how they were packed.
    """
    if PACKED not in manifest.settings:
        if base is not None:
            raise CheckpointMismatchError(
                f"{folder} has all weights of its model, none of them packed: build the model with a dtype "
                f"for frozen_dtype, and not {base['kind']!r}"
            )
        return False
    saved = manifest.settings[PACKED]
    kind, forms, weights = str(saved.get("kind")), saved.get("forms"), packed_weights(model)
    if isinstance(forms, dict):
        if weights is None or weights.kind != kind:
            raise CheckpointMismatchError(
                f"{folder} has its base packed as {kind!r:.20}: build this model with that frozen_dtype"
            )
        pack_loaded(model)
        own = _forms(_packed(model_tensors(model).tensors))
        apart = sorted(name for name in {*own, *forms} if own.get(name) != forms.get(name))
        if apart:
            raise CheckpointMismatchError(
                f"{folder} has a base that is packed otherwise than this model's ({abridged(apart)}): load "
                "this model's base from the same kind of checkpoint before the step"
            )
        return True
    if base is None or (kind, saved.get("digest")) != (base["kind"], base["digest"]):
        raise CheckpointMismatchError(
            f"{folder} was trained on a base packed as {kind!r:.20} that it does not have, and this model "
            f"has another: load that base with frozen_dtype={kind!r:.20}, from the same files"
        )
    return False


# The record of the step that a model was loaded from, with or without the optimizer saved with it.


@dataclass
class LoadedStep:
    """Number of the step, and whether its optimizer was loaded too; None if none was saved."""

    step: int
    with_optimizer: bool | None


def loaded_step(model: nn.Module, *, with_optimizer: bool) -> int | None:
    """Number of the step that a model was loaded from, with its optimizer or without; None if not so."""
    known = kept_of(model, LoadedStep)
    return known.step if known is not None and known.with_optimizer is with_optimizer else None

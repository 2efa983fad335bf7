"""Exports in the format of the checkpoint: what training has not changed is copied from it byte for byte.

Whether a weight is unchanged is seen by its values: every rank reads its part of the checkpoint again and
compares. So it does not matter how a weight came to be what it is.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.named import named_tensors
from fsdp_sft._model.record import kept_of
from fsdp_sft._model.state import ModelTensors
from fsdp_sft._quantised.carried import names_skips
from fsdp_sft._quantised.settings import Settings, settings_of
from fsdp_sft._ranks.agree import agreed, all_reduce_sum
from fsdp_sft._tensors.boxes import box_of, local_of
from fsdp_sft._tensors.packed import Packed
from fsdp_sft._tensors.packed_shard import PackedShard
from fsdp_sft._tensors.reader import read_jobs, threads_that_read
from fsdp_sft._tensors.stored import AT_ONCE, InFile
from fsdp_sft.errors import CheckpointNotFoundError, UnsupportedModelError, abridged
from fsdp_sft.shard.packing import is_as_stored
from fsdp_sft.weights.plan import LoadPlan, Target, make_plan
from fsdp_sft.weights.resolve import Checkpoint, LoadedFrom, open_checkpoint
from fsdp_sft.weights.rows import row_jobs, rows_of

AS_LOADED = "as loaded"


@dataclass(frozen=True)
class Unchanged:
    """The packed weights of a checkpoint, and which of them the model still has as they were.

    Attributes:
        settings: How the checkpoint is quantised.
        folder: Its folder.
        checkpoint: Its tensors.
        keys: Names that each of the model's weights is published under, by its name in the model, for those
            that are packed in the checkpoint.
        names: Those of the weights that are unchanged.
    """

    settings: Settings
    folder: Path
    checkpoint: Checkpoint
    keys: Mapping[str, tuple[str, ...]]
    names: frozenset[str]

    def copied(self, names: Iterable[str]) -> dict[str, InFile]:
        """The stored tensors that these weights are made of, and those of their activations and caches."""
        kept = {key for name in names for key in self.keys[name]}
        sources = self.checkpoint.sources
        names_of = {(stored.file, stored.entry.start): raw for raw, stored in self.checkpoint.stored.items()}
        parts = {key: _parts(sources[key], names_of) for key in sources}
        used = {raw for raws in parts.values() for raw in raws}
        raws = [raw for key in sorted(kept) for raw in parts[key]]
        owners = {_module(key) for key in kept}
        changed = {_module(key) for keys in self.keys.values() for key in keys} - owners
        around = {part for owner in owners for part in _parents(owner)}
        for raw in sorted(self.checkpoint.stored.keys() - used):
            within = next((part for part in _parents(raw) if part in owners or part in changed), None)
            if within in owners or (within is None and _module(raw) in around):
                raws.append(raw)
        return {raw: self.checkpoint.stored[raw] for raw in raws}

    def never_packed(self, content: ModelTensors) -> list[str]:
        """Modules of the model whose matrix the checkpoint has in 16 bits, such as embedding and head."""
        packed = {content.names.get(name, name) for name in self.keys}
        found = {
            _module(name)
            for name, first in content.names.items()
            if name.endswith(".weight") and content.tensors[first].ndim == 2 and first not in packed
        }
        return sorted(found)

    def modules_without(self, names: Iterable[str]) -> list[str]:
        """Modules that are packed in the checkpoint, of the weights that are not among these.

        They are named as they are published, and as in the model: experts that are stored one by one are a
        single module there.

        Raises:
            UnsupportedModelError: If the format's config cannot say that they are in 16 bits.
        """
        kept = set(names)
        changed = {name: keys for name, keys in self.keys.items() if name not in kept}
        modules = {_module(key) for name, keys in changed.items() for key in (name, *keys)}
        if modules and not names_skips(self.settings):
            raise UnsupportedModelError(
                f"a config of {self.settings.method} cannot say that {abridged(sorted(modules))} are not "
                f"quantised, which training has changed: leave out format={AS_LOADED!r}, which writes all "
                "weights in one dtype"
            )
        return sorted(modules)


def whole_modules(keys: Iterable[str], names: Collection[str], groups: Iterable[list[str]]) -> set[str]:
    """Those of the unchanged weights with whom all that belongs to them is unchanged.

    A module is packed or it is not, with all of its weights, in the eyes of a config; and weights that are
    converted together are written together.

    Args:
        keys: All weights that are packed in the checkpoint.
        names: Those that are unchanged.
        groups: Weights that are converted together.
    """
    packed, together, kept = set(keys), [set(group) for group in groups], set(names)
    while True:
        fitting = [group for group in together if group <= kept]
        whole: set[str] = set().union(*fitting)
        changed = {_module(name) for name in packed - whole}
        whole = {name for name in whole if _module(name) not in changed}
        if whole == kept:
            return kept
        kept = whole


def _parts(stored: Any, names_of: Mapping[tuple[Path, int], str]) -> list[str]:
    """Names of the stored tensors that a published one is made of."""
    places = [part.stored for part in stored.parts.values()] if isinstance(stored, Packed) else [stored]
    return [names_of[place.file, place.entry.start] for place in places]


def _module(key: str) -> str:
    """Name of the module that a stored tensor belongs to."""
    return key.rpartition(".")[0]


def _parents(name: str) -> list[str]:
    """Names of the modules around, from the inside out."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def check_format(format: Any) -> None:  # noqa: A002
    """Refuse a format of an export that there is not.

    Raises:
        ValueError: If it is neither None nor ``"as loaded"``.
    """
    if format not in (None, AS_LOADED):
        raise ValueError(f"format must be None or {AS_LOADED!r}, got {format!r}")


def find_unchanged(model: nn.Module, merges: Mapping[str, Any], *, compare: bool) -> Unchanged:
    """Find the packed weights of a model's checkpoint that the model has as they were.

    Args:
        model: The model, without adapters around it.
        merges: Its layers with adapters, by name.
        compare: Whether values are read and compared; if not, what is neither trained nor packed anew is
            unchanged.

    Raises:
        ValueError: If the model was not loaded from a quantised checkpoint under its own names.
        CheckpointNotFoundError: If that is no longer there.
        UnsupportedModelError: If no packed weight is unchanged.
        CheckpointFormatError: If the checkpoint cannot be read any more.

    Collective: all ranks.
    Memory: This rank's part of one weight.
    """
    with agreed("comparing the weights with those that were loaded"):
        loaded, settings = _source_of(model)
        checkpoint = open_checkpoint(loaded.folder, loaded.variant)
        plan = make_plan(model, checkpoint, missing="initialise", unexpected="ignore")
        keys = _packed_keys(plan, checkpoint)
        look = [name for name in sorted(keys) if not _is_other(model, name, merges)]
        changed = [compare and _is_changed(model, plan.targets[name], checkpoint) for name in look]
    counts = all_reduce_sum([float(one) for one in changed])
    same = {name for name, count in zip(look, counts, strict=True) if not count}
    names = frozenset(whole_modules(keys, same, [[name] for name in keys]))
    if not names:
        raise UnsupportedModelError(
            f"every weight that is packed in {loaded.folder} is trained, was changed, or is packed anew by "
            f"frozen_dtype, so that none can be copied: leave out format={AS_LOADED!r}, which writes all "
            "weights in one dtype, or use export_adapter"
        )
    return Unchanged(settings, loaded.folder, checkpoint, keys, names)


def _source_of(model: nn.Module) -> tuple[LoadedFrom, Settings]:
    """The quantised checkpoint that a model was loaded from, and how it is quantised.

    Raises:
        ValueError: If there is none, or its tensors were renamed.
        CheckpointNotFoundError: If it is no longer there.
    """
    loaded = kept_of(model, LoadedFrom)
    settings, why = None, "was loaded from a checkpoint that is not quantised"
    if loaded is None:
        why = "was loaded from none (load_weights and load_pretrained were not called)"
    elif loaded.is_renamed:
        why = "was loaded under other names than the checkpoint's (rename=)"
    elif not loaded.folder.is_dir():
        raise CheckpointNotFoundError(
            f"{loaded.folder} is gone, from which format={AS_LOADED!r} copies: put it there again, or leave "
            "the format out"
        )
    else:
        settings = settings_of(loaded.folder)
    if loaded is None or settings is None:
        raise ValueError(
            f"format={AS_LOADED!r} copies the weights of a quantised checkpoint that training has not "
            f"changed, and this model {why}: leave it out"
        )
    return loaded, settings


def _packed_keys(plan: LoadPlan, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    found = {}
    for name, target in plan.targets.items():
        group = plan.groups[target.group].keys if target.group is not None else ()
        keys = tuple(dict.fromkeys((*(piece.key for piece in target.pieces), *group)))
        if any(isinstance(checkpoint.sources[key], Packed) for key in keys):
            found[name] = keys
    return found


def _is_other(model: nn.Module, name: str, merges: Mapping[str, Any]) -> bool:
    """Whether a weight is trained, or packed anew."""
    parameter = model.get_parameter(name)
    is_packed_anew = isinstance(local_of(parameter), PackedShard) and not is_as_stored(model)
    return _module(name) in merges or parameter.requires_grad or is_packed_anew


def _is_changed(model: nn.Module, target: Target, checkpoint: Checkpoint) -> bool:
    """Whether this rank's part of a weight is another than the checkpoint's; if it cannot be known, it is."""
    if target.group is not None:
        return True
    tensor: Any = named_tensors(model)[target.name]
    box, local, sources = box_of(tensor), local_of(tensor), checkpoint.sources
    workers = threads_that_read()
    if isinstance(local, PackedShard):
        if not rows_of(target, sources)[0].is_like(local.lies.form):
            return True
        fresh = PackedShard(torch.zeros_like(local.rows), local.lies, local.count, local.dtype)
        read_jobs(row_jobs(target, sources, fresh, box, AT_ONCE), workers=workers)
        return not torch.equal(fresh.own_rows, local.own_rows)
    values = torch.empty_like(local)
    jobs = [
        job
        for piece in target.pieces
        for job in sources[piece.key].jobs(target.name, piece, box, values, at_once=AT_ONCE)
    ]
    read_jobs(jobs, workers=workers)
    return not torch.equal(values, local)

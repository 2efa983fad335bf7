"""Reading a prepared base: sharded tensors under the model's own names, each rank its own part of them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.conversions import match_checkpoint_keys, weight_conversions
from fsdp_sft._model.adapters import without_adapters
from fsdp_sft._model.named import named_tensors
from fsdp_sft._model.state import model_tensors
from fsdp_sft._model.twin import meta_twin
from fsdp_sft._ranks.agree import agreed
from fsdp_sft._tensors.boxes import box_of
from fsdp_sft._tensors.reader import threads_that_read
from fsdp_sft._tensors.stored import InFile, Stored, StoredFolder
from fsdp_sft.dcp_io.folder import open_folder
from fsdp_sft.dcp_io.manifest import Manifest
from fsdp_sft.dcp_io.model_state import check_model
from fsdp_sft.dcp_io.stored import SHARDS, StoredTensor
from fsdp_sft.errors import CheckpointCorruptError, CheckpointMismatchError
from fsdp_sft.weights.account import account
from fsdp_sft.weights.fill import Reading, fill
from fsdp_sft.weights.plan import LoadPlan, Target
from fsdp_sft.weights.prepared_note import PreparedBase
from fsdp_sft.weights.report import LoadReport
from fsdp_sft.weights.resolve import Checkpoint
from fsdp_sft.weights.vocabulary import shapes_before_new_tokens


def open_prepared(base: PreparedBase, *, verify: bool) -> Manifest:
    """The manifest of a prepared base, whose files have been checked, each on one rank.

    Args:
        base: The prepared base.
        verify: Whether to compare every file's checksum. False compares names, sizes and headers only.

    Raises:
        CheckpointCorruptError: If a file is damaged.

    Collective: all ranks.
    """
    manifest, problems = open_folder(base.folder, hashes=verify)
    if manifest is None:
        raise CheckpointCorruptError(
            f"{base.folder} is not sound: {'; '.join(problems[:5])}; delete it and call prepare_base again"
        )
    return manifest


def load_prepared_base(
    model: nn.Module, base: PreparedBase, manifest: Manifest, *, check_finite: bool, started: float
) -> LoadReport:
    """Read a prepared base into the shards of a model.

    Args:
        model: The model, with its adapters.
        base: The prepared base.
        manifest: What ``open_prepared`` returned.
        check_finite: See ``load_weights``.
        started: When the load began, by ``time.perf_counter``.

    Raises:
        CheckpointMismatchError: If the model has other names, ties, shapes or dtypes.

    Collective: all ranks.
    """
    with agreed(f"comparing the model with {base.folder}"):
        with without_adapters(model) as inner:
            twin = meta_twin(inner)
            plan = LoadPlan(
                twin=twin, conversions=weight_conversions(twin), before=shapes_before_new_tokens(inner)
            )
            checkpoint = _planned(inner, base.folder, _stored(inner, base, manifest), plan)
            # This marks the conversions that the source has gone through: an export runs them backwards.
            match_checkpoint_keys(twin, base.source_keys, plan.conversions)
        sources = account(model, plan)
    reading = Reading("prepared", workers=threads_that_read(), check_finite=check_finite)
    shards = [file.size for name, file in manifest.files.items() if name.startswith(f"{SHARDS}/")]
    reason = "every rank reads its own shards of what prepare_base wrote"
    return fill(
        model,
        plan,
        checkpoint,
        sources,
        reading,
        reason=reason,
        checkpoint_bytes=sum(shards),
        started=started,
    )


def _stored(model: Any, base: PreparedBase, manifest: Manifest) -> dict[str, StoredTensor]:
    """The stored tensor for each tensor of the model, by the first of its names.

    Raises:
        CheckpointMismatchError: If names, ties, shapes or dtypes differ. Two differences are allowed because
            the caller asked for them: rows for new tokens, and frozen shards in another dtype.
    """
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if trained and base.dtype not in trained:
        raise CheckpointMismatchError(
            f"{base.folder} was prepared in {base.dtype}, and the model's trained parameters are "
            f"{', '.join(sorted(map(str, trained)))}: build and shard it in {base.dtype}, or call "
            "prepare_base with the other master_dtype"
        )
    before = shapes_before_new_tokens(model)
    live = model_tensors(model, values=False)
    as_stored = {}
    for name, tensor in live.tensors.items():
        entry = (manifest.model or {}).get(name)
        is_cast = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        dtype = entry.dtype if entry is not None and is_cast else tensor.dtype
        as_stored[name] = torch.empty(before.get(name, tensor.shape), dtype=dtype, device="meta")
    return check_model(manifest, replace(live, tensors=as_stored))


def _planned(model: Any, folder: Path, stored: Mapping[str, StoredTensor], plan: LoadPlan) -> Checkpoint:
    """Add to a plan the parts of the stored tensors that this rank needs; where these parts lie."""
    files, tensors = StoredFolder(folder), named_tensors(model)
    sources: dict[str, Stored] = {}
    for name, entry in stored.items():
        pieces = []
        for file, part in entry.parts(box_of(tensors[name])):
            key = f"{entry.key} in {file}"
            place = InFile(folder / file, files.header(file).entries[entry.key])
            sources[key] = place
            pieces.append(place.piece(key, part.offset))
        is_parameter = isinstance(tensors[name], nn.Parameter)
        plan.targets[name] = Target(name, entry.shape, "region", tuple(pieces), None, is_parameter)
    return Checkpoint({}, sources)

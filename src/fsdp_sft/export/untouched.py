"""Towers that a model was built without, copied byte for byte from the folder that has them."""

from typing import Any

import torch

from fsdp_sft._compat.conversions import match_checkpoint_keys, weight_conversions
from fsdp_sft._model.absent import absent_towers, is_absent
from fsdp_sft._model.twin import meta_twin
from fsdp_sft._tensors.safetensors import bytes_of
from fsdp_sft._tensors.stored import InFile
from fsdp_sft.errors import CheckpointNotFoundError, UnsupportedModelError, abridged
from fsdp_sft.export.hf_files import HfFiles
from fsdp_sft.weights.resolve import open_checkpoint


def untouched_tensors(model: Any) -> dict[str, InFile]:
    """The tensors of the towers that a model was built without, by their names in the folder's files.

    Raises:
        CheckpointNotFoundError: If the folder is no longer there.
        UnsupportedModelError: If they are quantised, which the export's config would not say.
    """
    towers = absent_towers(model)
    if not towers:
        return {}
    folder = next(iter(towers.values()))
    if not folder.is_dir():
        raise CheckpointNotFoundError(
            f"{folder} is gone, from which the export copies {' and '.join(towers)}: put the base there "
            "again, or build the model without part='text'"
        )
    stored, twin = open_checkpoint(folder).sources, meta_twin(model)
    matched, _ = match_checkpoint_keys(twin, list(stored), weight_conversions(twin))
    keys = [
        key
        for target, (_, sources) in matched.items()
        if is_absent(target, towers)
        for names in sources.values()
        for key in names
    ]
    found = {key: kept for key in keys if isinstance(kept := stored[key], InFile)}
    if packed := [key for key in keys if key not in found]:
        raise UnsupportedModelError(
            f"{abridged(packed)} of {folder} are quantised, and the export's other weights are not: build "
            "the model without part='text'"
        )
    return found


def copy_untouched(writer: HfFiles, model: Any) -> None:
    """Write them, one at a time."""
    for name, stored in untouched_tensors(model).items():
        values = torch.empty(stored.entry.shape, dtype=stored.entry.dtype)
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.entry.start)
            file.readinto(bytes_of(values))
        writer.write(name, values)

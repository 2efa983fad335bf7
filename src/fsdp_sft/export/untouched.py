"""Stored tensors that an export copies byte for byte, such as the towers that a model was built without."""

from collections.abc import Mapping
from typing import Any

import torch

from fsdp_sft._compat.conversions import match_checkpoint_keys, weight_conversions
from fsdp_sft._model.absent import absent_towers, is_absent
from fsdp_sft._model.twin import meta_twin
from fsdp_sft._ranks.agree import this_rank, world_size
from fsdp_sft._tensors.disk import closing
from fsdp_sft._tensors.safetensors import bytes_of, open_file, read_at
from fsdp_sft._tensors.stored import InFile
from fsdp_sft.errors import CheckpointNotFoundError, UnsupportedModelError, abridged
from fsdp_sft.export.hf_files import HfFiles
from fsdp_sft.export.own_rows import OwnRows
from fsdp_sft.weights.resolve import open_checkpoint

_PIECE_BYTES = 16 << 20


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


def copy_stored(copied: Mapping[str, InFile], writer: HfFiles, own: OwnRows | None) -> None:
    """Write stored tensors piece by piece: each rank some, or rank 0 all if it alone has the new files."""
    ranks = world_size() if own is not None else 1
    for number, (name, stored) in enumerate(copied.items()):
        if number % ranks == this_rank():
            write = writer.write_piece if own is None else own.write_piece
            fd, size = open_file(stored.file), stored.entry.num_bytes
            with closing(fd):
                for at in range(0, size, _PIECE_BYTES):
                    piece = torch.empty(min(_PIECE_BYTES, size - at), dtype=torch.uint8)
                    read_at(fd, stored.entry.start + at, bytes_of(piece))
                    write(name, at, piece)
        writer.expect_no_more(name)

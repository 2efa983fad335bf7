"""What the header of a rank's file says beside its tensors: enough to place them without the manifest.

torch's distributed checkpoint reads such a folder of files by ``DCP_SHARDING_INFO``: for every name in the
file, where in the whole tensor the part begins. It takes the shape of the whole tensor from the parts that it
finds, so the shapes are here too, under a name of our own; rank 0's file also has the manifest's contents.

Source: ``torch/distributed/checkpoint/hf_storage.py``, ``HuggingFaceStorageReader.read_metadata``.
"""

import json
from collections.abc import Mapping
from typing import Any

from fsdp_sft._disk import FileRecord
from fsdp_sft.dcp_io.codec import dumps

_OFFSETS = "DCP_SHARDING_INFO"
_OWN = "fsdp_sft"
_MANIFEST = "fsdp_sft_manifest"
_MOST_MANIFEST_BYTES = 16 << 20  # of 100 MB that a header may take; above, the manifest cannot be rebuilt


def header_metadata(
    step: int | None,
    world_size: int,
    rank: int,
    offsets: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    description: Mapping[str, Any] | None,
    beside: Mapping[str, FileRecord],
) -> dict[str, str]:
    """The metadata of one file.

    Args:
        step: Of the checkpoint.
        world_size: Of the job that writes it.
        rank: Whose file it is.
        offsets: Name in the file to where in the whole tensor the part begins.
        shapes: Name in the file to the shape of the whole tensor.
        description: The manifest without the files; None but for rank 0.
        beside: Files that rank 0 has written beside this one, by name; those of other ranks are not noted.
    """
    whole = {key: list(shape) for key, shape in shapes.items()}
    own: dict[str, Any] = {"step": step, "world_size": world_size, "rank": rank, "shapes": whole}
    if description is not None:
        own["beside"] = {name: [record.size, record.sha256] for name, record in beside.items()}
    metadata = {
        "format": "pt",
        _OFFSETS: json.dumps({key: {"saved_offsets": list(offset)} for key, offset in offsets.items()}),
        _OWN: dumps(own).decode(),
    }
    text = dumps(description).decode() if description is not None else ""
    if 0 < len(text) <= _MOST_MANIFEST_BYTES:
        metadata[_MANIFEST] = text
    return metadata


def described_in(metadata: Mapping[str, str]) -> Any:
    """The manifest without the files, from the header of rank 0's file; None if it is not there."""
    return json.loads(metadata[_MANIFEST]) if _MANIFEST in metadata else None


def beside_in(metadata: Mapping[str, str]) -> dict[str, FileRecord]:
    """Files that rank 0 had written beside this one, which is its own.

    Raises:
        KeyError: If the file is not one of a checkpoint of this library; so do TypeError and ValueError.
    """
    found = json.loads(metadata[_OWN])["beside"]
    return {str(name): FileRecord(int(size), str(digest)) for name, (size, digest) in found.items()}


def placed_in(metadata: Mapping[str, str]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Name in the file to (shape of the whole tensor, where the part begins).

    Raises:
        KeyError: If the file is not one of a checkpoint of this library; so do TypeError and ValueError.
    """
    shapes, offsets = json.loads(metadata[_OWN])["shapes"], json.loads(metadata[_OFFSETS])
    return {key: (tuple(shapes[key]), tuple(entry["saved_offsets"])) for key, entry in offsets.items()}


def rank_in(metadata: Mapping[str, str]) -> tuple[int, int, int | None]:
    """(rank, world size, step) of a file.

    Raises:
        KeyError: If the file is not one of a checkpoint of this library.
    """
    own = json.loads(metadata[_OWN])
    return int(own["rank"]), int(own["world_size"]), own["step"]

"""Metadata in the header of a rank's file, with which its tensors can be placed without the manifest.

torch's distributed checkpoint reads a folder of such files by ``DCP_SHARDING_INFO``, which says for every
name in the file where in the full tensor the part begins. It infers the shape of the full tensor from the
parts that it finds, so the shapes are stated too, under a name of this library.

Source: ``torch/distributed/checkpoint/hf_storage.py``, ``HuggingFaceStorageReader.read_metadata``.
"""

import json
from collections.abc import Mapping
from typing import Any

from fsdp_sft._process.codec import dumps
from fsdp_sft.dcp_io.content import Parts

_OFFSETS = "DCP_SHARDING_INFO"
_OWN = "fsdp_sft"


def header_metadata(step: int | None, world_size: int, rank: int, parts: Parts) -> dict[str, str]:
    """The metadata of one file.

    Args:
        step: Number of the checkpoint's step.
        world_size: Number of ranks that write the checkpoint.
        rank: Rank that writes the file.
        parts: What the file holds.
    """
    shapes = {key: list(part.shape) for key, part in parts.items()}
    offsets = {key: {"saved_offsets": list(part.box.offset)} for key, part in parts.items()}
    own: dict[str, Any] = {"step": step, "world_size": world_size, "rank": rank, "shapes": shapes}
    return {
        "format": "pt",
        _OFFSETS: json.dumps(offsets),
        _OWN: dumps(own).decode(),
    }


def placed_in(metadata: Mapping[str, str]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """(shape of the full tensor, index in it at which the part begins), by name in the file.

    Raises:
        KeyError, TypeError, ValueError: If the file is not from a checkpoint of this library.
    """
    shapes, offsets = json.loads(metadata[_OWN])["shapes"], json.loads(metadata[_OFFSETS])
    return {key: (tuple(shapes[key]), tuple(entry["saved_offsets"])) for key, entry in offsets.items()}


def rank_in(metadata: Mapping[str, str]) -> tuple[int, int, int | None]:
    """(rank, world size, step) of a file.

    Raises:
        KeyError, TypeError, ValueError: If the file is not from a checkpoint of this library.
    """
    own = json.loads(metadata[_OWN])
    return int(own["rank"]), int(own["world_size"]), own["step"]

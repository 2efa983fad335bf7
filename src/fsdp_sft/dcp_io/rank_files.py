"""What belongs to one rank: its random number generators and the caller's own state."""

from pathlib import Path
from typing import Any

import torch

from fsdp_sft._disk import FileRecord, TensorReader, read_bytes, write_bytes, write_tensors
from fsdp_sft._random import check_generator_states, generator_states
from fsdp_sft.dcp_io.codec import decode, dumps, encode, loads
from fsdp_sft.dcp_io.manifest import MAX_JSON_BYTES, checked_size
from fsdp_sft.errors import CheckpointCorruptError


def rank_content(rank_state: Any) -> tuple[bytes, dict[str, torch.Tensor]]:
    """What to write for this rank: JSON, and the tensors that it refers to.

    Raises:
        TypeError: If ``rank_state`` has something that neither can hold; names the key path.
    """
    tensors: dict[str, torch.Tensor] = {}
    content = {
        "rng": encode(generator_states(), "rng", tensors),
        "rank_state": encode(rank_state, "rank_state", tensors),
    }
    return checked_size(dumps(content, canonical=False), "rank_state"), tensors


def write_rank_files(
    folder: Path, rank: int, content: tuple[bytes, dict[str, torch.Tensor]]
) -> dict[str, FileRecord]:
    """Write ``rank/RRRRR.json`` and ``rank/RRRRR.safetensors`` below ``folder``."""
    text, tensors = content
    names = file_names(rank)
    return {
        names[0]: write_bytes(folder / names[0], text),
        names[1]: write_tensors(folder / names[1], tensors),
    }


def file_names(rank: int) -> tuple[str, str]:
    """The two files of a rank."""
    return f"rank/{rank:05d}.json", f"rank/{rank:05d}.safetensors"


def read_rank_files(folder: Path, rank: int) -> tuple[dict[str, Any], Any]:
    """The generators' states and the caller's state, as they were given; changes nothing.

    Raises:
        CheckpointCorruptError: If a file is not what was written.
    """
    json_name, tensor_name = file_names(rank)
    text = read_bytes(folder / json_name, MAX_JSON_BYTES)
    tensors: dict[str, torch.Tensor] = {}
    with TensorReader(folder) as reader:
        for name, entry in reader.header(tensor_name).entries.items():
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
            reader.read(tensor_name, name, tensors[name])
    try:
        raw = loads(text, json_name)
        rng, rank_state = decode(raw["rng"], tensors), decode(raw["rank_state"], tensors)
        check_generator_states(rng)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointCorruptError(f"{folder / json_name} is not what was written: {error!r}") from error
    return rng, rank_state

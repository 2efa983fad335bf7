"""What belongs to one rank: its random number generators and the caller's own state.

It lies in the file of the rank's shards, under names of its own: only that rank reads it.
"""

from pathlib import Path
from typing import Any

import torch

from fsdp_sft._disk import TensorReader, read_bytes
from fsdp_sft._random import check_generator_states, generator_states
from fsdp_sft.dcp_io.codec import MALFORMED, decode, dumps, encode, loads
from fsdp_sft.dcp_io.manifest import LISTING_VERSIONS, MAX_JSON_BYTES, Manifest, checked_size
from fsdp_sft.dcp_io.stored import shard_file
from fsdp_sft.errors import CheckpointCorruptError

_PREFIX = "rank."


def rank_content(rank_state: Any) -> dict[str, torch.Tensor]:
    """What to write for this rank: JSON as bytes, and the tensors that it refers to.

    Raises:
        TypeError: If ``rank_state`` has something that neither can hold; names the key path.
    """
    tensors: dict[str, torch.Tensor] = {}
    content = {
        "rng": encode(generator_states(), "rng", tensors),
        "rank_state": encode(rank_state, "rank_state", tensors),
    }
    text = checked_size(dumps(content, canonical=False), "rank_state")
    return {"": torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors}


def keys_of_rank(rank: int, content: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same by the names in the file: ``rank.<number>`` for the JSON, that and a path for a tensor."""
    return {_key(rank, name): tensor for name, tensor in content.items()}


def is_of_a_rank(key: str) -> bool:
    """Whether a name in a file is that of such content."""
    return key.startswith(_PREFIX)


def read_rank_content(folder: Path, manifest: Manifest, rank: int) -> tuple[dict[str, Any], Any]:
    """The generators' states and the caller's state, as they were given; changes nothing.

    Raises:
        CheckpointCorruptError: If it is not what was written.
    """
    if manifest.version in LISTING_VERSIONS:
        name = f"rank/{rank:05d}.json"
        text = read_bytes(folder / name, MAX_JSON_BYTES)
        tensors = _read_all(folder, f"rank/{rank:05d}.safetensors", "")
    else:
        name = shard_file(rank)
        tensors = _read_all(folder, name, _key(rank, ""))
        text = tensors.pop("", torch.empty(0, dtype=torch.uint8)).numpy().tobytes()
    try:
        raw = loads(text, name)
        rng, rank_state = decode(raw["rng"], tensors), decode(raw["rank_state"], tensors)
        check_generator_states(rng)
    except (*MALFORMED, RuntimeError) as error:
        raise CheckpointCorruptError(f"{folder / name} is not what was written: {error!r}") from error
    return rng, rank_state


def _key(rank: int, name: str) -> str:
    return f"{_PREFIX}{rank}{'.' if name else ''}{name}"


def _read_all(folder: Path, file: str, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of a file whose names begin with ``prefix``, by the rest of their names."""
    tensors: dict[str, torch.Tensor] = {}
    with TensorReader(folder) as reader:
        for key, entry in reader.header(file).entries.items():
            if prefix and key != prefix and not key.startswith(f"{prefix}."):
                continue
            values = torch.empty(entry.shape, dtype=entry.dtype)
            reader.read(file, key, values)
            tensors[key.removeprefix(prefix).removeprefix("." if prefix else "")] = values
    return tensors

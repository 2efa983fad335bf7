"""The list of parts that a rank writes, its own state among them, and how headers of files describe it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp_sft._process.bounds import MAX_JSON_BYTES, parse_json
from fsdp_sft._process.codec import MALFORMED, decode, dumps, encode
from fsdp_sft._process.generators import check_generator_states, generator_states
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft._tensors.boxes import Box, local_of, whole
from fsdp_sft._tensors.reader import do_reads
from fsdp_sft._tensors.safetensors import num_bytes
from fsdp_sft._tensors.sharding import Sharding, sharding_of
from fsdp_sft._tensors.stored import Read, StoredFolder
from fsdp_sft.errors import CheckpointCorruptError, CheckpointError

SHARDS = "shards"
_LARGE_BYTES = 1 << 20  # smaller tensors that all ranks have lie together, in rank 0's file


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, whose sharding determines which rank's file has which part.

    Attributes:
        shape: Shape of the full tensor.
        dtype: Dtype of its elements.
        key: Name of the tensor in the files.
        sharding: Sharding of the tensor.
        copy: Number of the copy that was written, of those that the sharding has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str
    sharding: Sharding
    copy: int = 0

    def parts(self, wanted: Box) -> Iterator[tuple[str, Box]]:
        """(file, box in it) of the parts that intersect ``wanted``."""
        for rank, box in self.sharding.parts(self.shape, self.copy, wanted):
            yield shard_file(rank), box

    def part_of_rank(self, rank: int) -> Box | None:
        """The box of the tensor that one rank writes; None if it writes none."""
        return self.sharding.part_of_rank(self.shape, self.copy, rank)


class Part(NamedTuple):
    """A part of a tensor that this rank writes.

    Attributes:
        name: Name of the tensor in the file.
        box: Box of the full tensor that the part is.
        local: Values of the part: the live ones, or a copy.
        shape: Shape of the full tensor.
    """

    name: str
    box: Box
    local: torch.Tensor
    shape: tuple[int, ...]


def shard_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"{SHARDS}/{rank:05d}.safetensors"


def file_key(section: str, name: str) -> str:
    """Name of a tensor in the files, with dots between all parts as in torch's distributed checkpoints."""
    return f"{section}.{name.replace('/', '.')}"


def parts_of(section: str, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, StoredTensor], list[Part]]:
    """Which rank writes which part of each tensor, and the live parts that this rank writes.

    Ranks with the same part take turns, from tensor to tensor, except for small tensors that all ranks have.
    Step counts are one small tensor per parameter; spread over ranks, they would make every loading rank open
    every file.

    Args:
        section: ``"model"`` or ``"optimizer"``.
        tensors: Tensors by name, whole or sharded.

    Raises:
        CheckpointError: If this rank has another part of a tensor than its mesh and placements say.
    """
    stored: dict[str, StoredTensor] = {}
    parts: list[Part] = []
    for index, name in enumerate(sorted(tensors)):
        tensor, key, shape = tensors[name], file_key(section, name), tuple(tensors[name].shape)
        sharding = sharding_of(tensor)
        takes_turns = bool(sharding.splits) or num_bytes(tensor.dtype, shape) >= _LARGE_BYTES
        stored[name] = StoredTensor(
            shape, tensor.dtype, key, sharding, copy=index % sharding.copies if takes_turns else 0
        )
        box = stored[name].part_of_rank(this_rank())
        if box is None:
            continue
        local = local_of(tensor)
        if tuple(local.shape) != box.shape:
            raise CheckpointError(
                f"rank {this_rank()} has {tuple(local.shape)} of {name}; its mesh and placements give it "
                f"{box.shape}"
            )
        parts.append(Part(key, box, local, shape))
    return stored, parts


# Metadata in the header of a rank's file, with which its tensors can be placed without the manifest.
#
# torch's distributed checkpoint reads a folder of such files by ``DCP_SHARDING_INFO``, which says for every
# name in the file where in the full tensor the part begins. It infers the shape of the full tensor from the
# parts that it finds, so the shapes are stated too, under a name of this library.
#
# Source: ``torch/distributed/checkpoint/hf_storage.py``, ``HuggingFaceStorageReader.read_metadata``.

_OFFSETS = "DCP_SHARDING_INFO"
_OWN = "fsdp_sft"


def header_metadata(step: int, world_size: int, rank: int, parts: Sequence[Part]) -> dict[str, str]:
    """The metadata of one file.

    Args:
        step: Number of the checkpoint's step.
        world_size: Number of ranks that write the checkpoint.
        rank: Rank that writes the file.
        parts: What the file holds.
    """
    offsets = {part.name: {"saved_offsets": list(part.box.offset)} for part in parts}
    own: dict[str, Any] = {
        "step": step,
        "world_size": world_size,
        "rank": rank,
        "shapes": {part.name: list(part.shape) for part in parts},
    }
    return {"format": "pt", _OFFSETS: json.dumps(offsets), _OWN: dumps(own).decode()}


def placed_in(
    metadata: Mapping[str, str],
) -> tuple[tuple[int, int, int], dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """((rank, world size, step), (shape of the full tensor, where the part begins) by name) of a file.

    Raises:
        KeyError, TypeError, ValueError: If the file is not from a checkpoint of this library.
    """
    own, offsets = json.loads(metadata[_OWN]), json.loads(metadata[_OFFSETS])
    placed = {
        key: (tuple(own["shapes"][key]), tuple(entry["saved_offsets"])) for key, entry in offsets.items()
    }
    return (own["rank"], own["world_size"], own["step"]), placed


# State of one rank: its random number generators, its ``rank_state`` from the caller, and its parts of what
# an optimizer keeps in tensor subclasses. It is stored in the file of the rank's shards, under names that
# begin with ``rank.``.

RANK = "rank."


def rank_parts(rank_state: Any, optimizer: Mapping[str, Any]) -> list[Part]:
    """This rank's state to write: JSON as a tensor of bytes, and the tensors to which it refers.

    ``rank.<number>`` is the JSON; the tensors to which it refers add their key paths.

    Args:
        rank_state: State from the caller.
        optimizer: See ``parts_inside``.

    Raises:
        TypeError: If ``rank_state`` has a value that cannot be stored in either way; the message names its
            key path.
        CheckpointError: If it could not be read again.
    """
    tensors: dict[str, torch.Tensor] = {}
    content = {
        "rng": encode(generator_states(), "rng", tensors),
        "rank_state": encode(rank_state, "rank_state", tensors),
        "optimizer": encode(optimizer, "optimizer", tensors),
    }
    text = checked_size(dumps(content, canonical=False), "rank_state")
    try:
        decode(parse_json(text, "it"), tensors)  # as a load would do it
    except MALFORMED as error:
        raise CheckpointError(f"what is to be saved could not be loaded again: {error}") from error
    own = f"{RANK}{this_rank()}"
    every = {own: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    every |= {f"{own}.{path}": tensor.detach() for path, tensor in tensors.items()}
    return [Part(name, whole(value.shape), value, tuple(value.shape)) for name, value in every.items()]


def read_rank_content(folder: Path, rank: int) -> tuple[dict[str, Any], Any, dict[str, list[Any]]]:
    """The states of a rank's random number generators, its ``rank_state``, and what ``parts_inside`` made.

    Raises:
        CheckpointCorruptError: If the file does not hold what was written.
    """
    files, name, prefix = StoredFolder(folder), shard_file(rank), f"{RANK}{rank}"
    tensors: dict[str, torch.Tensor] = {}
    reads: list[Read] = []
    for key, entry in files.header(name).entries.items():
        if key == prefix or key.startswith(f"{prefix}."):
            values, box = torch.empty(entry.shape, dtype=entry.dtype), whole(entry.shape)
            reads += files.reads(key, [(name, box)], box, values)
            tensors[key.removeprefix(prefix).removeprefix(".")] = values
    do_reads(reads, damaged=CheckpointCorruptError)
    text = tensors.pop("", torch.empty(0, dtype=torch.uint8)).numpy().tobytes()
    try:
        raw = parse_json(text, name)
        rng, rank_state = decode(raw["rng"], tensors), decode(raw["rank_state"], tensors)
        own = decode(raw["optimizer"], tensors) if "optimizer" in raw else {}  # version 3 has none here
        apart = {name: [kind, context, {**inner}] for name, (kind, context, inner) in own.items()}
        check_generator_states(rng)
    except (*MALFORMED, RuntimeError) as error:
        raise CheckpointCorruptError(f"{folder / name} is not what was written: {error!r}") from error
    return rng, rank_state, apart


def checked_size(text: bytes, what: str) -> bytes:
    """``text``, unless it is too long to be read again.

    Raises:
        ValueError: If it is longer than ``MAX_JSON_BYTES``.
    """
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(
            f"{what} takes {len(text)} bytes as JSON, more than the {MAX_JSON_BYTES} that are read again; "
            "large state belongs in tensors: in rank_state, or in buffers of the model"
        )
    return text

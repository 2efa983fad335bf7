"""State of one rank: its random number generators, and its ``rank_state`` from the caller.

It is stored in the file of the rank's shards, under names that begin with ``rank.``.
"""

from pathlib import Path
from typing import Any

import torch

from fsdp_sft._process.codec import MALFORMED, decode, dumps, encode, loads
from fsdp_sft._process.generators import check_generator_states, generator_states
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft._tensors.boxes import whole
from fsdp_sft._tensors.reader import do_reads
from fsdp_sft._tensors.stored import Read, StoredFolder
from fsdp_sft.dcp_io.manifest import checked_size
from fsdp_sft.dcp_io.parts import Part, shard_file
from fsdp_sft.errors import CheckpointCorruptError

_PREFIX = "rank."


def rank_parts(rank_state: Any) -> list[Part]:
    """This rank's state to write: JSON as a tensor of bytes, and the tensors to which it refers.

    ``rank.<number>`` is the JSON; the tensors to which it refers add their key paths.

    Raises:
        TypeError: If ``rank_state`` has a value that cannot be stored in either way; the message names its
            key path.
    """
    tensors: dict[str, torch.Tensor] = {}
    content = {
        "rng": encode(generator_states(), "rng", tensors),
        "rank_state": encode(rank_state, "rank_state", tensors),
    }
    text = checked_size(dumps(content, canonical=False), "rank_state")
    every = {"": torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors}
    return [
        Part(_key(this_rank(), name), whole(tensor.shape), tensor.detach(), tuple(tensor.shape))
        for name, tensor in every.items()
    ]


def is_of_a_rank(key: str) -> bool:
    """Whether a name in a file belongs to the state of a rank."""
    return key.startswith(_PREFIX)


def read_rank_content(folder: Path, rank: int) -> tuple[dict[str, Any], Any]:
    """The states of a rank's random number generators, and its ``rank_state``. No generator is set.

    Raises:
        CheckpointCorruptError: If the file does not hold what was written.
    """
    files, name, prefix = StoredFolder(folder), shard_file(rank), _key(rank, "")
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
        raw = loads(text, name)
        rng, rank_state = decode(raw["rng"], tensors), decode(raw["rank_state"], tensors)
        check_generator_states(rng)
    except (*MALFORMED, RuntimeError) as error:
        raise CheckpointCorruptError(f"{folder / name} is not what was written: {error!r}") from error
    return rng, rank_state


def _key(rank: int, name: str) -> str:
    """Name in the file of an entry of a rank's content."""
    return f"{_PREFIX}{rank}{'.' if name else ''}{name}"

"""Whether ranks that share rows have been given the same ones."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp_sft._meshes import SameRows
from fsdp_sft._safetensors import bytes_of
from fsdp_sft._streams import host_copies
from fsdp_sft.context_parallel import SequenceGroup
from fsdp_sft.errors import BatchError

_WORD_BITS = 20  # a word times thousands of ranks, summed over them, is exact in float64


def to_compare_rows(batches: Sequence[Any], group: SequenceGroup | SameRows | None) -> list[float]:
    """Two numbers that add up to 0 over all ranks if those that share rows have the same ones.

    Args:
        batches: This rank's; the host waits for the device once, if they are there.
        group: Which ranks share rows; None where none do.
    """
    if group is None:
        return [0.0, 0.0]
    named = [
        (name, batch[name])
        for batch in batches
        if isinstance(batch, Mapping)
        for name in sorted(batch, key=str)
        if isinstance(batch[name], torch.Tensor)
    ]
    # Of each group another one: what differs in one must not make up for what differs in another.
    found = hashlib.blake2b(f"{group.share}".encode(), digest_size=5)
    for (name, _), value in zip(named, host_copies([value for _, value in named]), strict=True):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(bytes_of(value.contiguous()))
    word = int.from_bytes(found.digest(), "big")
    times = group.size - 1 if group.rank == 0 else -1
    return [float(times * (word >> shift & ((1 << _WORD_BITS) - 1))) for shift in (0, _WORD_BITS)]


def refuse_different_rows(sums: Sequence[float]) -> None:
    """Raise on all ranks, which have the same ``sums``.

    Raises:
        BatchError: If ranks that share rows have different ones.
    """
    if any(sums):
        raise BatchError(
            "ranks of one cp group have different batches, and each computes a part of the same rows: "
            "iterate with windows(loader, n, mesh=mesh), whose first rank of a group reads for all of it, or "
            "give samplers mesh=mesh, and collators nothing random that ranks draw by themselves. Ranks of "
            "one tp group need the same batches too: give samplers num_replicas= and rank= without tp"
        )

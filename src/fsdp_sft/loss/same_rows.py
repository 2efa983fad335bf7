"""Whether ranks that share rows have been given the same ones."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp_sft._safetensors import bytes_of
from fsdp_sft.errors import BatchError

_OF_ROWS = ("input_ids", "labels", "shift_labels", "loss_weights", "attention_mask", "position_ids")
_WORD_BITS = 20  # a word times thousands of ranks, summed over them, is exact in float64


def to_compare_rows(batches: Sequence[Any], ranks: int, rank: int) -> list[float]:
    """Two numbers that add up to 0 over all ranks if those that share rows have the same ones.

    Args:
        batches: This rank's, on the host.
        ranks: How many share rows.
        rank: Which of them this is.
    """
    if ranks == 1:
        return [0.0, 0.0]
    found = hashlib.blake2b(digest_size=5)
    for batch in batches:
        for name in _OF_ROWS:
            value = batch.get(name) if isinstance(batch, Mapping) else None
            if isinstance(value, torch.Tensor):
                found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                found.update(bytes_of(value.contiguous()))
    word = int.from_bytes(found.digest(), "big")
    times = ranks - 1 if rank == 0 else -1
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
            "give samplers mesh=mesh, and collators nothing random that ranks draw by themselves"
        )

"""Check that ranks which share rows have been given the same rows."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fsdp_sft._process.streams import host_copies
from fsdp_sft._ranks.mesh import SameRows
from fsdp_sft._tensors.safetensors import bytes_of
from fsdp_sft.attention.context_parallel import SequenceGroup
from fsdp_sft.errors import BatchError

_WORD_BITS = 20  # a word times thousands of ranks, summed over as many, is exact in float64


def to_compare_rows(batches: Sequence[Any], group: SequenceGroup | SameRows | None) -> list[float]:
    """Two numbers whose sums over all ranks are 0 if ranks that share rows have the same rows.

    The first rank of a group of n returns n - 1 times its digest, and each of the others its digest times -1.

    Args:
        batches: This rank's batches; if they are on a device, the host waits for it once.
        group: This rank's group of ranks that share rows; None if no ranks do.
    """
    if group is None:
        return [0.0, 0.0]
    named = [one for batch in batches for one in _named_tensors(batch)]
    # The digest includes the group's index, so that a difference in one group cannot cancel one in another.
    found = hashlib.blake2b(f"{group.share}".encode(), digest_size=5)
    for (name, _), value in zip(named, host_copies([value for _, value in named]), strict=True):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(bytes_of(value.contiguous()))
    word = int.from_bytes(found.digest(), "big")
    times = group.size - 1 if group.rank == 0 else -1
    return [float(times * (word >> shift & ((1 << _WORD_BITS) - 1))) for shift in (0, _WORD_BITS)]


def _named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch with their names, those in its dicts, lists and tuples included.

    A nested tensor is its rows.
    """
    if isinstance(batch, torch.Tensor) and batch.is_nested:
        yield from _named_tensors(batch.unbind(), name)
    elif isinstance(batch, torch.Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key in sorted(batch.keys(), key=str):  # a TensorDict itself is iterated by its rows
            yield from _named_tensors(batch[key], f"{name}.{key}" if name else str(key))
    elif isinstance(batch, (list, tuple)):
        for index, inner in enumerate(batch):
            yield from _named_tensors(inner, f"{name}.{index}")


def refuse_different_rows(sums: Sequence[float]) -> None:
    """Raise if the sums over all ranks of ``to_compare_rows`` are not 0; all ranks have the same sums.

    Raises:
        BatchError: If ranks that share rows have different rows.
    """
    if any(sums):
        raise BatchError(
            "ranks of one cp group have different batches, and each computes a part of the same rows: "
            "iterate with windows(loader, n, mesh=mesh), whose first rank of a group reads for all of it, or "
            "give samplers mesh=mesh, and collators nothing random that ranks draw by themselves. Ranks of "
            "one tp group need the same batches too: give samplers num_replicas= and rank= without tp"
        )

"""What a window's micro-batches are, agreed on before the first forward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fsdp_sft._agree import is_distributed, raise_first, world_size
from fsdp_sft.distributed import sum_over_mesh
from fsdp_sft.errors import BatchError
from fsdp_sft.loss import Batch, num_targets
from fsdp_sft.step.keys import Keys, are_equal, digest, keys_of, refuse_different_keys, to_compare

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Window:
    """What all ranks know of a window before its first forward.

    Attributes:
        targets: On all ranks.
        tokens: Likewise, without padding.
        keys: Of each micro-batch; the same on every rank.
    """

    targets: int
    tokens: int
    keys: tuple[Keys, ...]


def agree_on_window(micro_batches: list[Batch], mesh: "DeviceMesh | None") -> Window:
    """Look at the window and agree on it, or raise the same error on all ranks; one small all-reduce.

    Collective: all ranks of the mesh.
    """
    error: Exception | None = None
    targets = tokens = 0
    keys: list[Keys] = []
    try:
        micro_batches = _checked_window(micro_batches)
        targets = sum(num_targets(batch) for batch in micro_batches)
        tokens = sum(_num_tokens(batch) for batch in micro_batches)
        keys = [keys_of(batch) for batch in micro_batches]
    except Exception as caught:
        error = caught
    ranks = mesh.size() if mesh is not None else 1
    compared = to_compare([len(keys), *digest(keys)])
    sums = sum_over_mesh([targets, tokens, error is not None, *compared], mesh)
    if sums[2]:
        raise_on_mesh(error, "checking the window's micro-batches", mesh)
    if not are_equal(sums[3:5], ranks):
        raise BatchError(
            f"ranks have different numbers of micro-batches (this one {len(keys)}, {sums[3] / ranks:.2f} on "
            "average); iterate with windows(), which ends all ranks together"
        )
    if not are_equal(sums[3:], ranks):
        refuse_different_keys(keys, mesh)
    return Window(int(sums[0]), int(sums[1]), tuple(keys))


def raise_on_mesh(error: Exception | None, phase: str, mesh: "DeviceMesh | None") -> None:
    """Raise the first error on all ranks of the mesh, which all know that one of them failed."""
    if mesh is not None and is_distributed() and mesh.size() == world_size():
        raise_first(error, phase)
    # Ranks outside the mesh are not here to exchange a verdict with.
    raise error or RuntimeError(f"another rank of the mesh failed while {phase}")


def _checked_window(micro_batches: Any) -> list[Batch]:
    if isinstance(micro_batches, Mapping) or not isinstance(micro_batches, (list, tuple)):
        raise ValueError(
            f"train_step takes the window as a list of batches, got {type(micro_batches).__name__}; "
            "wrap a single batch as [batch]"
        )
    if not micro_batches:
        raise ValueError("train_step got an empty window; it needs at least one micro-batch")
    return list(micro_batches)


def to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on ``device``."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def _num_tokens(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return int(mask.sum()) if isinstance(mask, torch.Tensor) else _checked_ids(batch).numel()


def num_rows(batch: Batch) -> int:
    """Rows of the batch's ids."""
    return _checked_ids(batch).shape[0]


def _checked_ids(batch: Batch) -> torch.Tensor:
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"a batch needs 'input_ids', got {sorted(batch)}")
    return ids

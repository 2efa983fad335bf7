"""Causal-LM loss in which every target token of an optimizer step weighs the same.

The loss is a float32 sum. It is divided by the number of targets of the whole window (all ranks, all
micro-batches), never by a rank's own, and the averaging that FSDP2 does over ranks is cancelled:
the mean of per-rank means is something else as soon as ranks hold unequal numbers of targets.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fsdp_sft._agree import all_reduce_sum
from fsdp_sft.collate import IGNORE_INDEX
from fsdp_sft.distributed import mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Batch = Mapping[str, Any]
LossImpl = Literal["auto", "logits"]

_IMPLS = ("auto", "logits")


def count_targets(micro_batches: Iterable[Batch], *, group: dist.ProcessGroup | None = None) -> int:
    """Number of targets in a window: all its micro-batches on all ranks.

    Args:
        micro_batches: Batches with ``labels``, int64 ``(B, S)``, aligned with ``input_ids``.
        group: Ranks to sum over, with a backend that takes CPU tensors; None takes all ranks.

    Returns:
        How many labels, after the shift, are not -100.

    Raises:
        ValueError: If a batch has no proper labels.

    Collective: all ranks of ``group``.
    """
    own = sum(num_targets(batch) for batch in micro_batches)
    if group is None:
        return int(all_reduce_sum([own])[0])
    total = torch.tensor([own])
    dist.all_reduce(total, group=group)
    return int(total.item())


def num_targets(batch: Batch) -> int:
    """Number of targets in one batch of this rank: labels after the shift that are not -100."""
    return int((_checked_labels(batch)[:, 1:] != IGNORE_INDEX).sum())


def loss_sum(model: nn.Module, batch: Batch, *, impl: LossImpl = "auto") -> tuple[torch.Tensor, int]:
    """Cross entropy summed over this batch's targets.

    Args:
        model: A decoder-only language model, sharded or not, that returns ``logits``.
        batch: ``input_ids`` and ``labels``, int64 ``(B, S)``, on the model's device, with ``attention_mask``
            and whatever else its forward takes. The labels are shifted here, once.
        impl: ``"logits"`` computes the logits in full; ``"auto"`` takes the best there is for the model.

    Returns:
        A float32 scalar (float64 for float64 logits), connected to the parameters even where the batch has
        no target, and the number of targets.

    Raises:
        ValueError: For an encoder-decoder, a classifier, or a batch without proper labels.

    Collective: all ranks of the model's mesh, by its forward.
    Memory: Two float32 copies of the logits, 8 bytes times B x S x vocabulary, beside the model's own.
    """
    return _loss_sum(model, batch, impl), num_targets(batch)


def scale_for_backward(
    loss: torch.Tensor, *, num_targets: int, mesh: "DeviceMesh | None" = None
) -> torch.Tensor:
    """Scale a sum so that after FSDP2's averaging the gradient is that of the mean over ``num_targets``.

    Args:
        loss: Sum over this rank's targets in one micro-batch.
        num_targets: Targets of the whole window over all ranks, from ``count_targets``.
        mesh: Ranks that FSDP2 averages over; None takes all ranks of the job.

    Returns:
        ``loss * data-parallel size / num_targets``.

    Raises:
        ValueError: If ``num_targets`` is not positive.
    """
    if num_targets < 1:
        raise ValueError(
            f"num_targets must be at least 1, got {num_targets}: a window without targets has no mean; "
            "skip it on all ranks (train_step does) and filter such rows with filter_rows"
        )
    if mesh is not None:
        ranks = mesh.size()
    else:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    # FSDP2 averages over the mesh; cancel it so that every token weighs the same.
    return loss * (ranks / num_targets)


def causal_lm_loss(
    model: nn.Module,
    batch: Batch,
    *,
    num_targets: int,
    mesh: "DeviceMesh | None" = None,
    impl: LossImpl = "auto",
) -> torch.Tensor:
    """This micro-batch's share of the window's mean loss, ready for ``backward``.

    Args:
        model: A decoder-only language model, sharded or not.
        batch: As for ``loss_sum``.
        num_targets: Targets of the whole window over all ranks, from ``count_targets``.
        mesh: Ranks that the gradients are averaged over; None takes the mesh of the model's parameters, or
            a single process if it has none.
        impl: As for ``loss_sum``.

    Returns:
        A scalar. Summed over the window's micro-batches and averaged over ranks it is the mean over targets.

    Raises:
        ValueError: As for ``loss_sum`` and ``scale_for_backward``.

    Collective: all ranks of the mesh, by the model's forward.
    """
    mesh = mesh if mesh is not None else mesh_of(model)
    total = _loss_sum(model, batch, impl)
    if mesh is None:
        return total / _positive(num_targets)
    return scale_for_backward(total, num_targets=num_targets, mesh=mesh)


def _positive(num_targets: int) -> int:
    scale_for_backward(torch.zeros(()), num_targets=num_targets)  # the one place that checks it
    return num_targets


def _loss_sum(model: nn.Module, batch: Batch, impl: LossImpl) -> torch.Tensor:
    if impl not in _IMPLS:
        raise ValueError(f"impl must be one of {_IMPLS}, got {impl!r}")
    _refuse_encoder_decoder(model)
    labels = _checked_labels(batch)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if _takes_use_cache(model):
        inputs["use_cache"] = False  # a cache is of no use in training, and packed sequences leak through it
    logits = model(**inputs).logits
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            f"causal_lm_loss needs logits of shape (B, S, vocabulary) for labels {tuple(labels.shape)}, got "
            f"{tuple(logits.shape)} from {type(model).__name__}; for a classifier use the model's own loss"
        )
    return _cross_entropy_sum(logits[:, :-1], labels[:, 1:])


def _cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten().to(logits.device), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def _checked_labels(batch: Batch) -> torch.Tensor:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None:
        seen = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f"a batch needs 'labels' aligned with 'input_ids', got {seen}")
    ids = batch.get("input_ids")
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2 or labels.dtype != torch.int64:
        tensor = isinstance(labels, torch.Tensor)
        got = f"{labels.dtype} {tuple(labels.shape)}" if tensor else type(labels).__name__
        raise ValueError(f"labels must be an int64 tensor of shape (B, S), got {got}")
    if isinstance(ids, torch.Tensor) and ids.shape != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must be aligned with input_ids {tuple(ids.shape)}; the loss shifts"
        )
    return labels


def _refuse_encoder_decoder(model: nn.Module) -> None:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder: its labels are not shifted against its inputs. "
            "Use the loss that model(**batch) returns"
        )


def _takes_use_cache(model: nn.Module) -> bool:
    return "use_cache" in inspect.signature(model.forward).parameters

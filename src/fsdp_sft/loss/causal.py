"""The causal-LM loss of a model on a batch: one shift, a float32 sum, with or without logits."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_sft.collate import IGNORE_INDEX, refuse_masked_pack
from fsdp_sft.distributed import mesh_of
from fsdp_sft.loss.counting import (
    Batch,
    check_num_targets,
    is_shifted,
    num_targets,
    scale_for_backward,
    targets_of,
    without_labels,
)
from fsdp_sft.loss.head import loss_at_head, takes_use_cache
from fsdp_sft.loss.prepare import LossImpl, check_impl, choice_for, refuse_encoder_decoder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def loss_sum(model: nn.Module, batch: Batch, *, impl: LossImpl = "auto") -> tuple[torch.Tensor, int]:
    """Cross entropy summed over this batch's targets.

    Args:
        model: A decoder-only language model, sharded or not, that returns ``logits``.
        batch: ``input_ids`` and ``labels``, int64 ``(B, S)``, on the model's device, with ``attention_mask``,
            ``position_ids`` and whatever else its forward takes, which is passed on. The labels are shifted
            here, once. ``shift_labels``, the target of each position, take their place if there are any.
        impl: ``"chunked"`` never holds the logits of more than a chunk of targets; ``"liger"`` does the same
            by Liger's kernels (CUDA); ``"logits"`` computes them in full; ``"auto"`` is what
            ``prepare_loss`` decided, or decides now: chunked if the model's head allows it.

    Returns:
        A float32 scalar (float64 for float64 logits), connected to the parameters even where the batch has
        no target, and the number of targets.

    Raises:
        ValueError: For an encoder-decoder, a classifier, a batch without proper labels, or a model whose
            loss cannot be computed by ``impl``.

    Collective: all ranks of the model's mesh, by its forward.
    Memory: Beside the model's own, as ``linear_cross_entropy_sum``; for ``"logits"`` two float32 copies of
    them, 8 bytes times B x S x vocabulary.
    """
    return _loss_sum(model, batch, impl), num_targets(batch)


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
        check_num_targets(num_targets)
        return total / num_targets
    return scale_for_backward(total, num_targets=num_targets, mesh=mesh)


def _loss_sum(model: nn.Module, batch: Batch, impl: LossImpl) -> torch.Tensor:
    check_impl(impl)
    refuse_encoder_decoder(model)
    targets = targets_of(batch)
    refuse_masked_pack(batch)
    inputs = without_labels(batch)
    if takes_use_cache(model):
        inputs["use_cache"] = False  # a cache is of no use in training, and packed sequences leak through it
    if impl == "logits":
        return _from_logits(model, inputs, targets, whole=is_shifted(batch))
    planned: Any = _as_planned
    if torch.compiler.is_compiling():
        planned = torch.compiler.disable(planned)  # it swaps forwards, which a graph cannot hold
    loss: torch.Tensor = planned(model, inputs, targets, impl, is_shifted(batch))
    return loss


def _as_planned(
    model: nn.Module, inputs: dict[str, Any], targets: torch.Tensor, impl: LossImpl, whole: bool
) -> torch.Tensor:
    choice = choice_for(model, impl)
    head = choice.head() if choice.head is not None else None
    if choice.impl == "logits" or head is None:
        return _from_logits(model, inputs, targets, whole=whole)
    return loss_at_head(model, head, inputs, choice.loss_of(head, targets), choice.transform)


def _from_logits(
    model: nn.Module, inputs: dict[str, Any], targets: torch.Tensor, *, whole: bool
) -> torch.Tensor:
    """The loss of full logits; the last position has a target only if ``whole``."""
    logits = model(**inputs).logits
    if logits.ndim != 3 or logits.shape[:2] != targets.shape:
        raise ValueError(
            f"causal_lm_loss needs logits of shape (B, S, vocabulary) for labels {tuple(targets.shape)}, got "
            f"{tuple(logits.shape)} from {type(model).__name__}; for a classifier give train_step a loss_fn"
        )
    if whole:
        return _cross_entropy_sum(logits, targets)
    return _cross_entropy_sum(logits[:, :-1], targets[:, :-1])


def _cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten().to(logits.device), ignore_index=IGNORE_INDEX, reduction="sum"
    )

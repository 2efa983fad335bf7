"""The causal-LM loss of a model on a batch: labels shifted once, a float32 sum, with or without logits."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sft._model.sharded import refuse_own_divisor, reshard, training_mesh_of
from fsdp_sft._process.streams import travelling
from fsdp_sft._process.words import answered
from fsdp_sft._ranks.mesh import cp_size
from fsdp_sft.attention.context_parallel import sequence_group_of
from fsdp_sft.loss import counting
from fsdp_sft.loss.additions import RouterLoss
from fsdp_sft.loss.counting import (
    WEIGHTS_KEY,
    Batch,
    check_num_targets,
    num_targets,
    scaled_for_averaging,
    weight_of,
)
from fsdp_sft.loss.forward import loss_parts, ranks_of_router
from fsdp_sft.loss.part import own_part, refuse_part_in_whole, tokens_of
from fsdp_sft.loss.prepare import LossImpl
from fsdp_sft.loss.terms import Terms
from fsdp_sft.shard.expert_parallel import refuse_divided_twice

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def loss_sum(
    model: nn.Module,
    batch: Batch,
    *,
    impl: LossImpl = "auto",
    router_loss: RouterLoss | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, int]:
    """Cross entropy summed over this batch's targets.

    Before a model's first loss, its own loss on a tiny batch is compared with the cross entropy, so that no
    term that the model adds is lost silently.

    Args:
        model: Decoder-only language model, sharded or not, that returns ``logits``.
        batch: ``input_ids`` and ``labels``, int64 ``(B, S)``, on the model's device. Everything else
            (``attention_mask``, ``position_ids``, ...) is passed to the model's forward. Labels are shifted
            here, once. ``shift_labels``, which hold the target of each position, replace ``labels`` if
            present. ``loss_weights``, floating point ``(B, S)`` and aligned with the labels, are factors of
            the targets' losses.
        impl: Implementation of the loss. ``"chunked"`` holds the logits of one chunk of targets at a time;
            ``"logits"`` computes them in full. ``"auto"`` is what ``prepare_loss`` has chosen, or chooses
            now: chunked if the model's head allows it.
        router_loss: What to do with the loss of a mixture's router. ``"micro_batch"`` adds it, as the model
            computes it for this batch, times its coefficient and the number of targets; the result divided
            by that number is then the model's own loss. Filler of a pack does not count, and under context
            parallelism the whole rows count. ``"global_micro_batch"`` computes it over the tokens of all
            ranks of the model's mesh in this call; each rank's result has its share. ``"off"`` leaves it
            out. None is ``"micro_batch"`` if the config has ``output_router_logits``; if not, the loss is
            left out with one warning that names the coefficient.
        label_smoothing: Label smoothing, defined as in ``torch.nn.functional.cross_entropy``.
        z_loss: Factor of the z-loss, the squared logarithm of the softmax's denominator, which is added to
            each target's loss (PaLM: 1e-4).

    Returns:
        (the loss, the number of targets). The loss is a float32 scalar (float64 for float64 logits),
        connected to the parameters even if the batch has no target. Under context parallelism both are those
        of this rank's part of the rows, and their sums over the group's ranks are those of the batch.

    Raises:
        ModelLossError: If the model's own loss is not the cross entropy; the message says what it does. Also
            if the forward does something else to its head's output than when its loss was prepared, and if
            the router's loss has to be computed over several ranks or without a pack's filler, and is not
            transformers' usual one.
        ValueError: If the model is an encoder-decoder or a classifier, if the batch has no proper labels, or
            if the model's loss cannot be computed by ``impl``.

    Collective: all ranks of the model's mesh, by its forward.
    Memory: Beside the model's own memory, that of ``linear_cross_entropy_sum``. ``"logits"`` holds two
    float32 copies of the logits, 8 bytes times B x S x vocabulary.

    Example:
        >>> loss, num_targets = fs.loss_sum(model, batch)
        >>> mean = loss / num_targets
        >>> loss.dtype, loss.shape
        (torch.float32, torch.Size([]))
    """
    terms = Terms(label_smoothing=label_smoothing, z_loss=z_loss)
    batch = _own_part(model, batch)
    summed, router = loss_parts(model, batch, impl, router_loss, terms)
    targets = num_targets(batch)
    if router is not None:
        groups = () if torch.compiler.is_compiling() else ranks_of_router(model, batch, router_loss)
        summed = summed + router * _weight_of_router(batch, groups, router.device)
    return summed, targets


def _own_part(model: nn.Module, batch: Batch) -> Batch:
    """This rank's part of a batch."""
    if torch.compiler.is_compiling():
        return batch
    reshard(model)  # a forward before an optimizer's step leaves the root gathered, with the old values
    group = sequence_group_of(model)
    refuse_part_in_whole(group)
    return own_part(batch, group)  # type: ignore[no-any-return]


@answered
def causal_lm_loss(
    model: nn.Module,
    batch: Batch,
    *,
    num_targets: int,
    impl: LossImpl = "auto",
    router_loss: RouterLoss | None = None,
    num_tokens: int | None = None,
    target_weight: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """This micro-batch's share of the window's mean loss, ready for ``backward``.

    Args:
        model: Decoder-only language model, sharded or not.
        batch: Batch of the form that ``loss_sum`` takes.
        num_targets: Number of targets of the whole window over all ranks, from ``count_targets``.
        impl: Implementation of the loss; see ``loss_sum``.
        router_loss: What to do with the loss of a mixture's router; see ``loss_sum``. Here it is weighted by
            the micro-batch's share of the window's tokens, without padding.
        num_tokens: Number of tokens of the window over all ranks, without padding; None takes the number
            that ``count_targets`` has stored in ``num_targets``.
        target_weight: Sum of the window's ``loss_weights`` over all ranks, if its batches have any; None
            takes the sum that ``count_targets`` has stored in ``num_targets``.
        label_smoothing: Label smoothing; see ``loss_sum``.
        z_loss: Factor of the z-loss; see ``loss_sum``.

    Returns:
        A scalar. Summed over the window's micro-batches and averaged over ranks it is the mean over targets,
        weighted by ``loss_weights`` if there are any.

    Raises:
        ValueError: If ``loss_sum`` refuses the model or the batch, or ``num_targets`` is not positive or was
            counted for a mesh with another ``cp`` than the model's.

    Collective: all ranks, by the model's forward.

    Example:
        >>> num_targets = fs.count_targets(window)
        >>> for batch in window:
        ...     fs.causal_lm_loss(model, batch, num_targets=num_targets).backward()
        >>> optimizer.step()
    """
    mesh = training_mesh_of(model)
    if not torch.compiler.is_compiling():
        refuse_divided_twice(model)
    check_num_targets(num_targets)
    weight = _weight_of_window(batch, num_targets, target_weight)
    _refuse_other_sharing(num_targets, cp_size(mesh))
    terms = Terms(label_smoothing=label_smoothing, z_loss=z_loss)
    batch = _own_part(model, batch)
    summed, router = loss_parts(model, batch, impl, router_loss, terms)
    if router is not None:
        share = _share_of_tokens(batch, num_targets, num_tokens, mesh)
        summed = summed + router * (share * weight)
    if mesh is None:
        return summed / weight
    if not torch.compiler.is_compiling():
        refuse_own_divisor(model, mesh)
    return scaled_for_averaging(summed, weight)


def _refuse_other_sharing(num_targets: int, own: int) -> None:
    """Refuse targets that were counted for another ``cp`` than the model's ``own``."""
    counted = getattr(num_targets, "cp", None)
    if counted not in (None, own):
        raise ValueError(
            f"num_targets was counted for a mesh with cp={counted}, and each row of this model is computed "
            f"by {own} ranks: give count_targets, windows and samplers the model's mesh, by mesh="
        )


def _weight_of_window(batch: Batch, num_targets: int, target_weight: float | None) -> float:
    """Divisor of the window's loss: the sum of its weights, or its number of targets."""
    known = target_weight if target_weight is not None else getattr(num_targets, "weight", None)
    if known is None and batch.get(WEIGHTS_KEY) is not None:
        raise ValueError(
            "a batch with loss_weights is divided by the sum of the window's weights, which is not known: "
            "take num_targets from count_targets, which sums them too, or pass target_weight"
        )
    weight = num_targets if known is None else known
    check_num_targets(weight)
    return weight


def _share_of_tokens(
    batch: Batch, num_targets: int, num_tokens: int | None, mesh: "DeviceMesh | None"
) -> float:
    """A batch's share of the window's tokens."""
    tokens = num_tokens if num_tokens is not None else getattr(num_targets, "num_tokens", 0)
    if tokens:
        return tokens_of(batch) / tokens
    if num_targets == counting.num_targets(batch) and (mesh is None or mesh.size() == 1):
        return 1.0  # the batch is the window
    raise ValueError(
        "the router's loss of a micro-batch weighs by its tokens over those of the window, which are not "
        "known: take num_targets from count_targets, which counts them too, or pass num_tokens or "
        "router_loss='off'"
    )


def _weight_of_router(
    batch: Batch, groups: tuple[dist.ProcessGroup, ...], device: torch.device
) -> torch.Tensor | float:
    """Factor that brings this rank's router loss, a mean, into the unit of the summed loss.

    It is the weight of the batch's targets. Over several ranks it is their total weight, times this rank's
    share of their tokens.
    """
    weight = weight_of(batch)
    if not groups:
        return weight
    own = float(tokens_of(batch))
    total = travelling(torch.tensor([weight, own], dtype=torch.float64), device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return total[0] * own / total[1].clamp(min=1)

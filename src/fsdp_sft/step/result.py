"""The result of a step, and the error of one whose gradient is not finite."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft._tensors.packed_shard import values_of
from fsdp_sft.errors import NonFiniteGradientError, abridged
from fsdp_sft.experts import ExpertLoad

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; the same on every rank.

    Attributes:
        loss: Mean over the window's targets on all ranks, weighted by ``loss_weights`` where batches have
            them; nan for a window without targets.
        grad_norm: 2-norm of the whole gradient before clipping; nan if there was no gradient.
        num_targets: Number of targets of the window on all ranks. If ``count_fn`` returns weights, their sum,
            rounded; ``target_weight`` is exact.
        num_tokens: Number of tokens of the window on all ranks, without padding. Padding is what
            ``attention_mask`` marks as such, and the filler at the end of a pack.
        skipped: Whether the optimizer did not step.
        skip_reason: Reason for a skipped step: ``"no targets"``, ``"no weight"`` (all targets have weight
            0) or ``"inf gradients"``. None if the optimizer did step.
        router_loss: Loss of a mixture's router, its coefficient included. The step minimises the sum of
            ``loss`` and this; 0 if no router's loss is added.
        expert_load: Number of tokens that each expert of a mixture was given; None unless ``watch_experts``
            was called.
        target_weight: Sum of the targets' ``loss_weights`` on all ranks, by which ``loss`` was divided;
            without weights the number of targets.
        metrics: Values that ``loss_fn`` returned by name beside the loss, summed over the window's batches on
            all ranks and divided like ``loss``: means per target.
        token_accuracy: Share of the targets to which the model gave the largest logit, before the step;
            ``loss_weights`` do not count. nan for a window without targets, and with ``loss_fn`` or
            ``count_fn``.
    """

    loss: float
    grad_norm: float
    num_targets: int
    num_tokens: int
    skipped: bool
    skip_reason: str | None = None
    router_loss: float = 0.0
    target_weight: float = 0.0
    expert_load: ExpertLoad | None = None
    metrics: dict[str, float] = field(default_factory=dict, hash=False)
    token_accuracy: float = math.nan


def non_finite(
    norm: float,
    loss: float,
    own_loss: float,
    names: Mapping[torch.nn.Parameter, str],
    mesh: "DeviceMesh | None",
) -> NonFiniteGradientError:
    """The error of a gradient that is not finite: the ranks whose loss is not, and the weights that are not.

    Args:
        norm: Norm of the gradient.
        loss: Mean loss of the window.
        own_loss: This rank's summed loss.
        names: The model's parameters with their names.
        mesh: Ranks that share the window.

    Collective: all ranks of the mesh.
    """
    where = ""
    if mesh is not None and mesh.size() > 1:
        finite = all_gather_objects(math.isfinite(own_loss))
        ranks = [str(rank) for rank, is_finite in enumerate(finite) if not is_finite]
        where = f" (that of rank {abridged(ranks)} is not finite)" if ranks else " (finite on every rank)"
    broken = [name for one, name in names.items() if not bool(values_of(one.detach()).isfinite().all())]
    advice = (
        f"{abridged(broken)} hold values that are not finite: load the weights again"
        if broken
        else "Look at the last batches, lower the learning rate"
    )
    return NonFiniteGradientError(
        f"the gradient norm is {norm} at a loss of {loss:.4g}{where}; parameters and optimizer are "
        f"unchanged. {advice}, or start from the last checkpoint"
    )

"""A step that is queued on the device, and its result, for which the host waits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fsdp_sft._process.streams import LateValues
from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft._ranks.mesh import copies_of_rows, sum_over_mesh
from fsdp_sft._tensors.packed_shard import values_of
from fsdp_sft.errors import NonFiniteGradientError, abridged
from fsdp_sft.experts import ExpertLoad, LateLoad
from fsdp_sft.step.objective import OwnMetrics
from fsdp_sft.step.window import Window

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


@dataclass(eq=False)
class QueuedStep:
    """A step whose forwards and backwards have been queued on the device.

    Attributes:
        values: Numbers that are being copied to the host: the gradient's norm, this rank's summed loss and
            router's loss, its number of correct targets, and the infs that a scaler has found.
        window: The step's window.
        mesh: Ranks that share it.
        knows_accuracy: Whether the number of correct targets means something.
        expert_load: Tokens that experts were given, being copied to the host; None if they are not counted.
        metrics: This rank's sums of the metrics of the caller's loss; None if the loss is the library's.
    """

    values: LateValues
    window: Window
    mesh: "DeviceMesh | None"
    knows_accuracy: bool
    expert_load: LateLoad | None
    metrics: OwnMetrics | None = None

    @property
    def has_infs(self) -> bool:
        """Whether a scaler found an inf; the host waits for the device."""
        return any(self.values.read()[4:])

    def _where(self) -> str:
        """On which ranks the loss was not finite, in words; collective, like ``result``."""
        if self.mesh is None or self.mesh.size() == 1:
            return ""
        finite = all_gather_objects(math.isfinite(self.values.read()[1]))
        ranks = [str(rank) for rank, is_finite in enumerate(finite) if not is_finite]
        whose = f"that of rank {abridged(ranks)} is not finite" if ranks else "finite on every rank"
        return f" ({whose})"

    @property
    def is_finite(self) -> bool:
        """Whether the gradient's norm is finite; the host waits for the device."""
        return math.isfinite(self.values.read()[0])

    def result(self, names: Mapping[torch.nn.Parameter, str]) -> StepResult:
        """The result of the step; the host waits for the device.

        Args:
            names: The model's parameters with their names, of which an error names those that are broken.

        Raises:
            NonFiniteGradientError: If the gradient was not finite.

        Collective: all ranks of the mesh.
        """
        norm, *sums = self.values.read()
        loss, added, correct = sum_over_mesh(sums[:3], self.mesh)
        window = self.window
        copies = copies_of_rows(self.mesh)
        divisor = window.weight * copies
        loss, added = loss / divisor, added / divisor
        metrics = {} if self.metrics is None else self.metrics.over(self.mesh, divisor)
        if not self.is_finite and not self.has_infs:
            broken = [
                name for one, name in names.items() if not bool(values_of(one.detach()).isfinite().all())
            ]
            raise NonFiniteGradientError(
                f"the gradient norm is {norm} at a loss of {loss:.4g}{self._where()}; parameters and "
                "optimizer are unchanged. "
                + (
                    f"{abridged(broken)} hold values that are not finite: load the weights again"
                    if broken
                    else "Look at the last batches, lower the learning rate"
                )
                + ", or start from the last checkpoint"
            )
        reason = "inf gradients" if self.has_infs else None
        load = None if self.expert_load is None else self.expert_load.read()
        return StepResult(
            loss,
            norm,
            window.targets,
            window.tokens,
            skipped=self.has_infs,
            skip_reason=reason,
            router_loss=added,
            target_weight=window.weight,
            expert_load=load,
            metrics=metrics,
            token_accuracy=correct / (window.targets * copies) if self.knows_accuracy else math.nan,
        )

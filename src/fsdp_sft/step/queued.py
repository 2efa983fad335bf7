"""A step from the moment that its work is queued to the moment that the host knows what came of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from fsdp_sft._late import taken
from fsdp_sft._streams import LateValues
from fsdp_sft.distributed import sum_over_mesh
from fsdp_sft.errors import NonFiniteGradientError
from fsdp_sft.experts import ExpertLoad, LateLoad
from fsdp_sft.loss import HeadChecks
from fsdp_sft.step.window import raise_on_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank.

    Attributes:
        loss: Mean over the window's targets on all ranks, each by its weight; nan for a window without any.
        grad_norm: 2-norm of the whole gradient before clipping; nan where there was none.
        num_targets: Targets of the window on all ranks.
        num_tokens: Tokens of the window on all ranks, without padding: what ``attention_mask`` calls so, and
            what a pack is filled up with.
        skipped: Whether the optimizer did not step.
        skip_reason: ``"no targets"``, ``"no weight"`` where all of them weigh 0, ``"inf gradients"``, or
            ``"no step before"`` of the first with ``sync="late"``; None if it did step.
        router_loss: What a mixture's router adds to ``loss``, its coefficient included: the sum of both is
            what was minimised. 0 where nothing is added.
        expert_load: How many tokens each expert of a mixture was given; None unless ``watch_experts`` was
            called.
        target_weight: Sum of the targets' ``loss_weights`` on all ranks, which ``loss`` is the mean by;
            without any as many as there are targets.
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


def without_step(reason: str, num_tokens: int = 0) -> StepResult:
    """The result where there was nothing to step with."""
    return StepResult(math.nan, math.nan, 0, num_tokens, True, reason)


@dataclass(eq=False)
class QueuedStep:
    """A step whose forwards and backwards have been queued.

    Attributes:
        values: On their way to the host: the gradient's norm, this rank's loss and router's loss, and what
            a scaler has found.
        targets: Of the window on all ranks.
        tokens: Likewise.
        weight: What the targets weigh together, likewise.
        mesh: The ranks that share it.
        checks: Of its forwards.
        problem: Why no checkpoint could hold the optimizer's state.
        undo: Takes back what an optimizer did that has left the step out on the device.
        is_late: Whether optimizers had to leave it out by themselves.
        expert_load: What experts were given, on its way to the host; None if nobody looks.
        copies: How many ranks have computed each row.
    """

    values: LateValues
    targets: int
    tokens: int
    weight: float
    mesh: "DeviceMesh | None"
    checks: HeadChecks
    problem: Exception | None = None
    undo: list[Callable[[], None]] = field(default_factory=list)
    is_late: bool = False
    expert_load: LateLoad | None = None
    copies: int = 1

    @property
    def has_infs(self) -> bool:
        """Whether a scaler found an inf; the host waits for the device."""
        return any(self.values.read()[3:])

    @property
    def is_finite(self) -> bool:
        """Whether the gradient's norm is; the host waits for the device."""
        return math.isfinite(self.values.read()[0])

    def check(self) -> None:
        """Raise if the gradient was not finite, on all ranks, as its norm is that of all.

        Raises:
            NonFiniteGradientError: It is said without the mean loss, for which ranks would have to meet.
        """
        if not self.is_finite and not self.has_infs:
            self._take_back()
            raise self._not_finite()

    def result(self) -> StepResult:
        """What came of it.

        Raises:
            NonFiniteGradientError: If the gradient was not finite.
            NotFusedError: If a forward has changed since its loss was prepared.
            UnstorableStateError: If no checkpoint could hold the optimizer's state.

        Collective: all ranks of the mesh.
        """
        norm, loss, added, *_ = self.values.read()
        changed = None if self.is_finite else self.checks.problem()
        own = [loss, added, self.problem is not None, changed is not None]
        loss, added, has_problem, has_changed = sum_over_mesh(own, self.mesh)
        if not self.is_finite and not self.has_infs:
            self._take_back()
        if has_problem:
            raise_on_mesh(self.problem, "looking at the optimizer's state after its first step", self.mesh)
        if has_changed:
            raise_on_mesh(changed, "looking at what the model makes of its head's output", self.mesh)
        loss, added = (total / (self.weight * self.copies) for total in (loss, added))
        if not self.is_finite and not self.has_infs:
            raise self._not_finite(loss)
        reason = "inf gradients" if self.has_infs else None
        skipped = reason is not None
        load = None if self.expert_load is None else self.expert_load.read()
        return StepResult(loss, norm, self.targets, self.tokens, skipped, reason, added, self.weight, load)

    def _take_back(self) -> None:
        while self.undo:
            self.undo.pop()()

    def _not_finite(self, loss: float | None = None) -> NonFiniteGradientError:
        norm = self.values.read()[0]
        at = "" if loss is None else f" at a loss of {loss:.4g}"
        state = "parameters and optimizer are unchanged"
        if self.is_late:
            at += " in the step before this one"
            state += " since before that step, and the scheduler is one step ahead of them"
        return NonFiniteGradientError(
            f"the gradient norm is {norm}{at}; {state}. Look at the last batches, lower the learning rate, "
            "or start from the last checkpoint"
        )


@dataclass(frozen=True)
class NothingQueued:
    """In the place of a step, where the window had nothing to step with."""

    found: StepResult

    def check(self) -> None:
        """There is nothing that could be wrong."""

    def result(self) -> StepResult:
        """What came of it."""
        return self.found


def late_result(model: nn.Module) -> StepResult | None:
    """What the last ``train_step(..., sync="late")`` did, which no later one has returned yet.

    Call it once after the loop; the host waits for the device. None if there is nothing left to say.

    Args:
        model: As ``train_step`` got it.

    Raises:
        NonFiniteGradientError: As ``train_step`` raises it.

    Collective: all ranks that shared the step.
    """
    step = taken(model)
    assert step is None or isinstance(step, (QueuedStep, NothingQueued))
    return None if step is None else step.result()

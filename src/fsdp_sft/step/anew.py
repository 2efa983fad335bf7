"""Agreement of all ranks on which findings about a model and its loss no longer hold."""

from typing import TYPE_CHECKING

from torch import nn

from fsdp_sft._model.record import is_changed
from fsdp_sft.attention.context_parallel import SequenceGroup, compare_again
from fsdp_sft.loss import forget_changed, forget_choice, needs_choice
from fsdp_sft.step.loss_is_sum import is_untold, take
from fsdp_sft.step.once import done_with
from fsdp_sft.step.own_loss import Objective
from fsdp_sft.step.trained import has_replicas, refuse_different_replicas
from fsdp_sft.step.window import Anew

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_REPLICAS = "its replicas were compared"


def what_is_new(
    model: nn.Module, objective: Objective, mesh: "DeviceMesh | None" = None, *, check_sum: bool
) -> Anew:
    """What this rank has to find out anew before the next forward.

    Args:
        model: Model with its weights.
        objective: Definition of its loss.
        mesh: Ranks that train it together; None if it is not trained.
        check_sum: Whether to check that the caller's loss returns a sum; False takes it on trust.
    """
    forward = is_changed(model)
    replicas = has_replicas(model, mesh) and _REPLICAS not in done_with(model)
    if objective.loss_fn is None:
        return Anew(forward, not forward and needs_choice(model, objective.impl), replicas=replicas)
    if not check_sum:
        take(model, objective.loss_fn)
    untold = check_sum and (forward or is_untold(model, objective.loss_fn))
    return Anew(forward, sum=untold, replicas=replicas)


def find_out_anew(
    model: nn.Module,
    objective: Objective,
    anew: Anew,
    group: SequenceGroup | None,
    mesh: "DeviceMesh | None" = None,
) -> None:
    """Forget what no longer holds on some rank, so that all ranks find it out again together.

    Collective: all ranks of the mesh, if it is under context parallelism or there are replicas to compare.
    """
    if anew.replicas:
        refuse_different_replicas(model, mesh)
        done_with(model).add(_REPLICAS)
    if anew.forward:
        forget_changed(model, anew.forward, mesh)
    elif anew.choice:
        forget_choice(model, objective.impl)
    compare_again(model, group)

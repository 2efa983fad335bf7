"""Terms that a model adds to its cross entropy: a router's loss can be added too, any other is refused."""

import logging
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

from fsdp_sft._compat.models import original_class
from fsdp_sft._model.adapters import forward_parameters
from fsdp_sft._model.record import record_of
from fsdp_sft._model.sharded import training_mesh_of
from fsdp_sft._model.twin import text_config
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._ranks.mesh import sum_over_mesh
from fsdp_sft.errors import ModelLossError, NonFiniteGradientError
from fsdp_sft.loss.own import (
    Coefficient,
    Different,
    Incomparable,
    NotFinite,
    OwnLoss,
    ask,
    coefficient_of,
    router_coefficients,
)

RouterLoss = Literal["micro_batch", "global_micro_batch", "off"]

_FLAG = "output_router_logits"
_WAY_OUT = (
    "Give train_step and evaluate a loss_fn that returns the loss that you mean, summed over the targets"
)
_logger = logging.getLogger("fsdp_sft.loss")


@dataclass(frozen=True)
class Additions:
    """Terms that are added to a model's cross entropy.

    Attributes:
        router: Coefficient of the router's loss; None if that is not added.
        inputs: Arguments of the forward that make it compute the router's loss.
        is_balanced: Whether the router's loss is the one that ``Balance`` computes.
    """

    router: Coefficient | None
    inputs: dict[str, Any]
    is_balanced: bool = False

    def of(self, output: Any, model: nn.Module) -> torch.Tensor | None:
        """The router's loss in a forward's output, times its coefficient; None if it is not added.

        Raises:
            ModelLossError: If the forward returned a loss although it got no labels, or lacks the router's
                loss that is to be added.
        """
        if isinstance(getattr(output, "loss", None), torch.Tensor):
            raise ModelLossError(
                f"{_name(model)} returned a loss although it was given no labels: something in the batch "
                f"makes it add to its loss what is not computed here. {_WAY_OUT}"
            )
        if self.router is None:
            return None
        aux = getattr(output, "aux_loss", None)
        if not isinstance(aux, torch.Tensor):
            raise ModelLossError(
                f"{_name(model)} returned no router's loss (aux_loss) in this forward, although it did when "
                "it was asked on a tiny batch: its blocks may be compiled in a way that drops what "
                "routers say. Compile it otherwise, or take router_loss='off'"
            )
        return self.router.read() * aux


@dataclass
class _Known:
    """Additions to a model's loss."""

    by_flag: dict[bool | None, Additions] = field(default_factory=dict)
    is_compared: bool = True


@dataclass
class _Said:
    """Remembers whether the warning of a router's loss that is left out was given."""

    left_out: bool = False


def check_router_loss(router_loss: str | None) -> None:
    """Raise for an unknown ``router_loss``."""
    if router_loss not in (None, *get_args(RouterLoss)):
        allowed = ", ".join(map(repr, get_args(RouterLoss)))
        raise ValueError(f"router_loss must be None or one of {allowed}, got {router_loss!r}")


def compare_or_not(model: nn.Module, compare: bool, impl: int) -> None:
    """Record whether the model's own loss has to be the cross entropy.

    Args:
        model: The model.
        compare: False takes the cross entropy, whatever the model's own loss is.
        impl: Number of the implementation.

    Raises:
        ValueError: If ranks differ in ``compare`` or ``impl``.

    Collective: all ranks of the model's mesh.
    """
    mesh = training_mesh_of(model)
    *saying, impls, squares = sum_over_mesh([compare, not compare, impl, impl * impl], mesh)
    if all(saying):
        raise ValueError(f"prepare_loss: {int(saying[0])} ranks say compare=True and {int(saying[1])} do not")
    if squares * sum(saying) != impls * impls:
        raise ValueError("prepare_loss: ranks ask for different implementations (impl=)")
    record_of(model).keep(_Known(is_compared=compare))


def refuse_meta(model: nn.Module) -> None:
    """Raise for a model without weights, before a forward of it would fail midway."""
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(f"{_name(model)} has parameters on the meta device: load its weights first")


def additions_to(model: nn.Module, router_loss: RouterLoss | None) -> Additions:
    """What the loss of ``model`` has beside the cross entropy, found once and the same on all ranks.

    Args:
        model: Model with its weights.
        router_loss: ``"off"`` does not add the router's loss, the other names do. None adds it if the config
            has ``output_router_logits``, and if not, warns once that it is left out.

    Raises:
        ModelLossError: If the model's own loss is not the cross entropy, or if a router's loss is asked for
            that it does not have or that ``prepare_loss(compare=False)`` has excluded.

    Collective: all ranks of the model's mesh, the first time.
    """
    takes_flag = _FLAG in forward_parameters(model)
    configured = _configured(model)
    wanted = configured if router_loss is None else router_loss != "off"
    if wanted and not takes_flag and router_loss is not None:
        raise ModelLossError(
            f"router_loss={router_loss!r}: the forward of {_name(model)} takes no {_FLAG}, so there is no "
            f"router's loss to add. {_WAY_OUT}"
        )
    if router_loss is None and not configured and takes_flag:
        _say_what_is_left_out(model)
    # The argument is passed only if it differs from the config: dense models of a family that also has
    # experts take it too.
    flag = wanted if takes_flag and wanted != configured else None
    known = record_of(model).kept_or_new(_Known)
    if not known.is_compared:
        if wanted and router_loss is not None:
            raise ModelLossError(
                f"router_loss={router_loss!r}: prepare_loss(compare=False) took the cross entropy alone for "
                f"the loss of {_name(model)}; leave compare out to train its router's loss too"
            )
        return Additions(None, {} if flag is None else {_FLAG: flag})
    if flag not in known.by_flag:
        known.by_flag[flag] = _find_out(model, flag, wanted, router_loss)
    return known.by_flag[flag]


def _find_out(model: nn.Module, flag: bool | None, wanted: bool, router_loss: str | None) -> Additions:
    """Ask the model for its own loss and explain it; all ranks of the mesh agree on the outcome."""
    refuse_meta(model)
    own = ask(model, flag)
    coefficient, reason = _explain(model, own)
    way_out = _WAY_OUT
    if isinstance(own, Incomparable):
        reason = f"it cannot be compared, because {own}"
        way_out += ", or call prepare_loss(model, compare=False) to train the cross entropy alone"
    if wanted and coefficient is None and not reason and router_loss is not None:
        why = own if isinstance(own, str) and own else "its forward returns no router's loss (aux_loss)"
        reason = f"router_loss={router_loss!r}: {why}"
    mesh = training_mesh_of(model)
    balanced = isinstance(own, OwnLoss) and own.is_balanced
    failed, differ = sum_over_mesh([bool(reason), not balanced], mesh)
    if failed:
        if isinstance(reason, NotFinite):
            raise NonFiniteGradientError(reason)
        reason = reason or "another rank of the mesh has found a difference"
        raise ModelLossError(
            f"the own loss of {_name(model)} is not what is computed here: {reason}. {way_out}"
        )
    if isinstance(own, str) and (mesh is None or mesh.get_rank() == 0):
        _logger.info("loss of %s: not compared with its own, because %s", _name(model), own)
    return Additions(coefficient if wanted else None, {} if flag is None else {_FLAG: flag}, not differ)


def _explain(model: nn.Module, own: OwnLoss | str) -> tuple[Coefficient | None, str]:
    """(the coefficient of the router's loss or None, why the model's loss is not explained or "")."""
    if isinstance(own, str):
        return None, own if isinstance(own, Different) else ""
    coefficient = coefficient_of(model, own)
    if coefficient is not None:
        return coefficient, ""
    different = own.why_different(model)
    if isinstance(different, NotFinite):
        return None, different
    if different and own.aux_loss is not None:
        different = "it adds a router's loss (aux_loss), and what it multiplies that with cannot be told"
    numbers = f" ({float(own.loss):.6g} against {own.expected:.6g} on a tiny batch)"
    return None, different and different + numbers


def _configured(model: nn.Module) -> bool:
    """Whether the config, or its text config, asks for the router's loss."""
    configs = [getattr(unwrapped(model), "config", None), text_config(model)]
    return any(getattr(each, _FLAG, None) is True for each in configs)


def _say_what_is_left_out(model: nn.Module) -> None:
    """Warn once that a router's loss with a positive coefficient is not added."""
    said = record_of(model).kept_or_new(_Said)
    if said.left_out:
        return
    said.left_out = True
    left_out = next((c for c in router_coefficients(model) if c.read() > 0), None)
    mesh = training_mesh_of(model)
    if left_out is not None and (mesh is None or mesh.get_rank() == 0):
        _logger.warning(
            "%s has %s=%g, and its router's loss is not trained, because its config has no "
            "output_router_logits: router_loss='micro_batch' adds it, 'off' leaves it out without a word",
            *(_name(model), left_out.name, left_out.read()),
        )


def _name(model: nn.Module) -> str:
    """Class name of a model, without wrappers and as it was before it was sharded."""
    return original_class(unwrapped(model)).__name__

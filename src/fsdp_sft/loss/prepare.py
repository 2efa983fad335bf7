"""How a model's loss is computed: proved by ``prepare_loss``, or at its first use.

A model may add terms to its loss (a router's loss, a z-loss, heads that predict further tokens), smooth the
labels, ignore another label than -100, or not shift. So its own loss on a tiny batch is compared with the
cross entropy of its logits: equal, or refused with both numbers. A router's loss is the one term that is
added here too.
"""

import logging
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_sft._compat.models import intercept_balance_loss, original_class
from fsdp_sft._model.adapters import forward_parameters
from fsdp_sft._model.inputs import no_cache
from fsdp_sft._model.record import record_of
from fsdp_sft._model.sharded import compute_device, training_mesh_of
from fsdp_sft._model.twin import text_config
from fsdp_sft._model.wrappers import base_of, unwrapped
from fsdp_sft._process.generators import unmoved
from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft._ranks.mesh import sum_over_mesh
from fsdp_sft.errors import ModelLossError
from fsdp_sft.loss.head import LossChoice, ProbeError, fusible_head, proved, tiny_ids, trying, wide
from fsdp_sft.loss.part import within
from fsdp_sft.loss.router import (
    BALANCE,
    WAY_OUT,
    Additions,
    Balance,
    RouterLoss,
    _intercepted,
    coefficient_of,
    name_of,
)
from fsdp_sft.targets import IGNORE_INDEX, shifted

LossImpl = Literal["auto", "chunked", "logits"]

_IMPLS = get_args(LossImpl)
_ROUTER_LOSSES = (None, *get_args(RouterLoss))
ROUTER_FLAG = "output_router_logits"
# Largest relative difference of equal losses. Losses of narrower dtypes have been rounded.
_TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5}
_logger = logging.getLogger("fsdp_sft.loss")


@dataclass
class Prepared:
    """What was said of a model's loss by ``prepare_loss``, and found out about it.

    Attributes:
        compare: Whether its own loss has to be the cross entropy.
        router_loss: What to do with the router's loss where a call does not say.
        additions: Terms that it adds, by the value of the forward's argument ``output_router_logits``.
        choices: Implementations of its loss, by ``impl``.
        has_warned: Whether the warning of a router's loss that is left out was given.
    """

    compare: bool = True
    router_loss: RouterLoss | None = None
    additions: dict[bool | None, Additions] = field(default_factory=dict)
    choices: dict[str, LossChoice] = field(default_factory=dict)
    has_warned: bool = False


def prepare_loss(
    model: nn.Module,
    *,
    impl: LossImpl = "auto",
    router_loss: RouterLoss | None = None,
    compare: bool = True,
) -> str:
    """Say how a model's loss is computed, and prove it: for ``train_step``, ``evaluate`` and ``loss_sum``.

    Without a call, the first loss does the same with the defaults. Call this function again, on all ranks,
    after a change of the model's forward (another head, scale or loss): what was proved is not looked at
    again.

    A loss without full logits needs a head that is a linear layer, or what peft trains of one
    (``modules_to_save``, trained tokens). The model's logits must be the head's output up to a scale and a
    soft cap. That is checked on a tiny batch, on which the loss must also equal that of the model's real
    logits. A hook on the head then sees the loss in place of the logits.

    Args:
        model: Decoder-only language model with its weights, sharded or not. Its mode, buffers, gradients and
            the random number generators are left as they were. A sharded model is resharded.
        impl: ``"auto"`` takes the chunked loss if possible, and full logits with a logged warning if not.
            ``"chunked"`` raises if it is not. ``"logits"`` computes full logits.
        router_loss: What to do with the loss of a mixture's router; see ``loss_sum``.
        compare: Whether to compare the model's own loss, ``model(**batch, labels=...)``, with the cross
            entropy. False trains the cross entropy alone, whatever the model's own loss is: for a model whose
            own loss raises, or has terms that are not to be trained.

    Returns:
        ``"chunked"`` or ``"logits"``. The choice and its reason are logged.

    Raises:
        ModelLossError: If the model's own loss is not the cross entropy, or cannot be computed to compare it;
            see ``loss_sum``.
        ValueError: If ``impl`` or ``router_loss`` is none of these, if ranks differ in arguments, if the
            model is an encoder-decoder or on the meta device, or if its loss cannot be computed by ``impl``;
            the message has the reason.

    Collective: all ranks of the model's mesh, by four forwards of 2 x 8 tokens.
    Memory: With trained tokens on the head, a copy of its weight in each forward, and its gradient in float32
    until the backward.

    Example:
        >>> fs.prepare_loss(model)
        'chunked'
    """
    _check("router_loss", router_loss, _ROUTER_LOSSES)
    refuse_encoder_decoder(model)
    asked = impl, router_loss, bool(compare)
    if training_mesh_of(model) is not None and len(set(all_gather_objects(asked))) > 1:
        raise ValueError("prepare_loss: ranks call with different arguments; give all of them the same")
    prepared = Prepared(compare=compare, router_loss=router_loss)
    record_of(model).keep(prepared)
    additions_to(model, None)
    choice = _decide(model, impl)
    prepared.choices.update({impl: choice, "auto": choice})
    return "logits" if choice.known_head is None else "chunked"


def choice_for(model: nn.Module, impl: LossImpl) -> LossChoice:
    """The choice for ``impl``, made now if there is none.

    Collective: all ranks of the model's mesh, the first time.
    """
    choices = record_of(model).kept_or_new(Prepared).choices
    if impl not in choices:
        choices[impl] = _decide(model, impl)
    return choices[impl]


def _check(name: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        none = "None or " if None in allowed else ""
        raise ValueError(f"{name} must be {none}one of {allowed}, got {value!r}")


def _decide(model: nn.Module, impl: LossImpl) -> LossChoice:
    """Make the choice for ``impl``; all ranks of the mesh take part."""
    _check("impl", impl, _IMPLS)
    if impl == "logits":
        return LossChoice()
    name = original_class(unwrapped(model)).__name__
    mesh = training_mesh_of(model)
    first = mesh is None or mesh.get_rank() == 0

    def agreed(reason: str) -> str:
        """This rank's reason, or the number of other ranks that have one; empty if no rank has."""
        failed = sum_over_mesh([bool(reason)], mesh)[0]
        others = f"{int(failed)} other ranks of the mesh could not compute it from the hidden states"
        return reason or others * bool(failed)

    # Ranks agree before the proof, because its forwards are collective, and again on its outcome.
    head, reason = fusible_head(model)
    reason, choice = agreed(reason), LossChoice()
    if head is not None and not reason:
        try:
            choice = proved(model, head)
        except ProbeError as error:
            reason = str(error)
        reason = agreed(reason)
    if reason and impl != "auto":
        raise ModelLossError(f"the loss of {name} cannot be computed by impl={impl!r}: {reason}")
    if reason:
        choice = LossChoice()
    if first and reason:
        _logger.warning("loss of %s: full logits, because %s", name, reason)
    elif first:
        _logger.info("loss of %s: chunked, %s", name, choice.transform)
    return choice


def refuse_encoder_decoder(model: nn.Module) -> None:
    """Raise for an encoder-decoder, whose labels are not shifted against its inputs."""
    model = unwrapped(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelLossError(
            f"{original_class(model).__name__} is an encoder-decoder: its labels are not shifted against its "
            "inputs. Give train_step and evaluate a loss_fn, such as the sum that model(**batch).loss is the "
            "mean of"
        )


def additions_to(model: nn.Module, router_loss: RouterLoss | None) -> Additions:
    """What the loss of ``model`` has beside the cross entropy, found once and the same on all ranks.

    Args:
        model: Model with its weights.
        router_loss: ``"off"`` does not add the router's loss, the other names do. None is what
            ``prepare_loss`` was told; without that, the router's loss is added if the config has
            ``output_router_logits``, and if not, a warning says once that it is left out.

    Raises:
        ModelLossError: If the model's own loss is not the cross entropy, or if a router's loss is asked for
            that it does not have or that ``prepare_loss(compare=False)`` has excluded.

    Collective: all ranks of the model's mesh, the first time.
    """
    _check("router_loss", router_loss, _ROUTER_LOSSES)
    prepared = record_of(model).kept_or_new(Prepared)
    router_loss = router_loss or prepared.router_loss
    takes_flag = ROUTER_FLAG in forward_parameters(model)
    configs = [getattr(unwrapped(model), "config", None), text_config(model)]
    configured = any(getattr(each, ROUTER_FLAG, None) is True for each in configs)
    wanted = configured if router_loss is None else router_loss != "off"
    if wanted and router_loss is not None and not (takes_flag and prepared.compare):
        why = (
            f"the forward of {name_of(model)} takes no {ROUTER_FLAG}: it has no router's loss to add. "
            f"{WAY_OUT}"
            if not takes_flag
            else "prepare_loss(compare=False) took the cross entropy alone for the loss of this model"
        )
        raise ModelLossError(f"router_loss={router_loss!r}: {why}")
    if router_loss is None and not configured and takes_flag and not prepared.has_warned:
        prepared.has_warned = True
        name, value = coefficient_of(model)
        mesh = training_mesh_of(model)
        if value > 0 and (mesh is None or mesh.get_rank() == 0):
            _logger.warning(
                "%s has %s=%g, and its router's loss is not trained, because its config has no "
                "output_router_logits: prepare_loss(model, router_loss='micro_batch') adds it, 'off' leaves "
                "it out without a word",
                *(name_of(model), name, value),
            )
    # The argument is passed only if it differs from the config: dense models of a family that also has
    # experts take it too.
    flag = wanted if takes_flag and wanted != configured else None
    inputs = {} if flag is None else {ROUTER_FLAG: flag}
    if not prepared.compare:
        return Additions(False, inputs)
    if flag not in prepared.additions:
        prepared.additions[flag] = _compared(model, inputs, wanted, router_loss)
    return replace(prepared.additions[flag], over_ranks=router_loss == "global_micro_batch")


def _compared(
    model: nn.Module, inputs: dict[str, Any], wanted: bool, router_loss: RouterLoss | None
) -> Additions:
    """The model's own loss, explained; all ranks of the mesh agree on the outcome."""
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(f"{name_of(model)} has parameters on the meta device: load its weights first")
    try:
        has_aux, balanced, reason = own_loss_is_ours(model, inputs)
        if wanted and not has_aux and not reason and router_loss is not None:
            reason = f"has no router's loss (aux_loss) for router_loss={router_loss!r}"
    except ProbeError as error:
        has_aux, balanced = False, False
        reason = (
            f"cannot be compared, because {error}: if a forward without labels works, call "
            "prepare_loss(model, compare=False) to train the cross entropy alone"
        )
    failed, differ = sum_over_mesh([bool(reason), not balanced], training_mesh_of(model))
    if failed:
        reason = reason or "is another than what is computed here on another rank of the mesh"
        raise ModelLossError(f"the own loss of {name_of(model)} {reason}. {WAY_OUT}")
    return Additions(wanted and has_aux, inputs, not differ)


def own_loss_is_ours(model: nn.Module, inputs: dict[str, Any]) -> tuple[bool, bool, str]:
    """Compare a model's own loss in training mode with the cross entropy of its logits, on a tiny batch.

    Returns:
        (whether the model adds a router's loss, whether that is what ``Balance`` computes, why its loss is
        another one or "").

    Raises:
        ProbeError: If the model raises.

    Collective: all ranks of the model's mesh, by one forward or two.
    """
    kinds = forward_parameters(model)
    if "labels" not in kinds and not any(each.kind is each.VAR_KEYWORD for each in kinds.values()):
        return False, False, ""
    device, inner = compute_device(model), unwrapped(model)
    balance = Balance(replaces=False)
    intercept_balance_loss(base_of(inner), _intercepted)
    with trying(model), within(BALANCE, balance):
        ids = tiny_ids(model)
        # Labels in which losses may differ: unequal numbers of targets a row, special tokens, -100.
        labels = ids.roll(1, dims=0)
        for column, special in enumerate(("pad", "bos", "eos"), start=2):
            token = getattr(getattr(inner, "config", None), f"{special}_token_id", None)
            if isinstance(token, int) and 0 <= token < getattr(text_config(model), "vocab_size", 0):
                labels[0, column] = token
        labels[0, 6] = labels[1, 1:5] = IGNORE_INDEX
        given = {"input_ids": ids, **no_cache(model), **inputs}
        model.train()
        with unmoved([device]):
            output = model(**given, labels=labels)
        logits: Any = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.shape[:2] != labels.shape:
            logits = model(**given).logits  # a fused kernel returns a loss or logits
        loss: Any = getattr(output, "loss", None)
        aux: Any = getattr(output, "aux_loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            _logger.info("loss of %s: its forward with labels returns none to compare with", name_of(model))
            return False, False, ""
        targets = shifted(labels).flatten().to(logits.device)
        expected = float(F.cross_entropy(wide(logits).flatten(0, 1), targets, ignore_index=IGNORE_INDEX))
        name, coefficient = coefficient_of(model)
        has_aux = isinstance(aux, torch.Tensor) and bool(name)
        if has_aux:
            expected += coefficient * float(aux)
        own, near = float(loss), _TOLERANCE.get(loss.dtype, 2 * torch.finfo(loss.dtype).eps)
    is_balanced = (
        has_aux and balance.loss is not None and math.isclose(float(balance.loss), float(aux), rel_tol=near)
    )
    broken = not math.isfinite(own) and not math.isfinite(expected)  # which a step says in its own words
    if broken or math.isclose(own, expected, rel_tol=near, abs_tol=1e-3 * near):
        return has_aux, is_balanced, ""
    also = f" and {name} times aux_loss" * has_aux
    return (
        has_aux,
        is_balanced,
        f"is not what is computed here: on a tiny batch it is {own:.6g}, and the cross entropy{also} "
        f"{expected:.6g}",
    )

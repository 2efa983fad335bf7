"""How a model's loss is computed: proved by ``prepare_loss``, or at its first use.

A model may add terms to its loss (a router's loss, a z-loss, heads that predict further tokens), smooth the
labels, ignore another label than -100, or not shift. So its own loss on a tiny batch is compared with the
cross entropy of its logits: equal, or refused with both numbers. A router's loss is the one term that is
added here too, as the model computes it.
"""

import logging
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

from fsdp_sft._model.forward import forward_parameters, no_cache
from fsdp_sft._model.sharded import compute_device, training_mesh_of
from fsdp_sft._model.twin import text_config
from fsdp_sft._model.view import base_of, original_class, record_of, unwrapped
from fsdp_sft._process.generators import unmoved
from fsdp_sft._ranks.agree import all_gather_objects, this_rank
from fsdp_sft._ranks.mesh import sum_over_mesh
from fsdp_sft.errors import ModelLossError
from fsdp_sft.loss.head import LossChoice, ProbeError, fusible_head, proved, tiny_ids, trying
from fsdp_sft.loss.plain import plain_losses
from fsdp_sft.targets import IGNORE_INDEX, shifted

LossImpl = Literal["auto", "chunked", "logits"]
RouterLoss = Literal["micro_batch", "off"]

ROUTER_FLAG = "output_router_logits"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # of the models and configs of transformers
_WAY_OUT = (
    "Give train_step and evaluate a loss_fn that returns the loss that you mean, summed over the targets"
)
# Largest relative difference of equal losses. Losses of narrower dtypes have been rounded.
_TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5}
_logger = logging.getLogger("fsdp_sft.loss")


@dataclass
class Prepared:
    """What was said of a model's loss by ``prepare_loss``, and found out about it at its first use.

    Attributes:
        impl: Which implementation was asked for.
        router_loss: What to do with the router's loss; None follows the config.
        compare: Whether its own loss has to be the cross entropy.
        additions: What ``additions_to`` has found, by whether the config asked for the router's loss.
        choice: The implementation; None as long as nobody has asked.
    """

    impl: LossImpl = "auto"
    router_loss: RouterLoss | None = None
    compare: bool = True
    additions: dict[bool, tuple[bool, dict[str, Any]]] = field(default_factory=dict)
    choice: LossChoice | None = None


def prepare_loss(
    model: nn.Module,
    *,
    impl: LossImpl = "auto",
    router_loss: RouterLoss | None = None,
    compare: bool = True,
) -> str:
    """Say how a model's loss is computed, and prove it: for each step, evaluation and loss of this model.

    Without a call, the first loss does the same with the defaults. Call this function again, on all ranks,
    after a change of the model's forward (another head, scale or loss): what was proved is not looked at
    again.

    A loss without full logits needs a head that is a linear layer, or peft's copy of one
    (``modules_to_save``). The model's logits must be the head's output up to a scale and a soft cap that its
    config names. That is checked on a tiny batch, on which the loss must also equal that of the model's real
    logits. A hook on the head then sees the loss in place of the logits.

    Args:
        model: Decoder-only language model with its weights, sharded or not. Its mode, buffers, gradients and
            the random number generators are left as they were. A sharded model is resharded.
        impl: ``"auto"`` takes the chunked loss if possible, and full logits with a logged warning if not.
            ``"chunked"`` raises if it is not. ``"logits"`` computes full logits.
        router_loss: What to do with the loss of a mixture's router. ``"micro_batch"`` adds it as the model
            computes it for each micro-batch of a rank, times the coefficient of its config. ``"off"`` leaves
            it out. None adds it if the config has ``output_router_logits``, and if not, leaves it out with
            one warning that names the coefficient.
        compare: Whether to compare the model's own loss, ``model(**batch, labels=...)``, with the cross
            entropy. False trains the cross entropy alone, whatever the model's own loss is: for a model whose
            own loss raises, or has terms that are not to be trained.

    Returns:
        ``"chunked"`` or ``"logits"``. The choice and its reason are logged.

    Raises:
        ModelLossError: If the model's own loss is not the cross entropy, or cannot be computed to compare it;
            the message has both numbers, or the reason. Also if the model has no router's loss to add.
        ValueError: If ``impl`` or ``router_loss`` is none of these, if ranks differ in arguments, if the
            model is an encoder-decoder or on the meta device, or if its loss cannot be computed by ``impl``;
            the message has the reason.

    Collective: all ranks of the model's mesh, by four forwards of 2 x 8 tokens.

    Example:
        >>> fs.prepare_loss(model)
        'chunked'
    """
    if impl not in get_args(LossImpl):
        raise ValueError(f"impl must be one of {get_args(LossImpl)}, got {impl!r}")
    if router_loss not in (None, *get_args(RouterLoss)):
        raise ValueError(f"router_loss must be None or one of {get_args(RouterLoss)}, got {router_loss!r}")
    refuse_encoder_decoder(model)
    asked = impl, router_loss, bool(compare)
    if training_mesh_of(model) is not None and len(set(all_gather_objects(asked))) > 1:
        raise ValueError("prepare_loss: ranks call with different arguments; give all of them the same")
    record_of(model).keep(Prepared(impl, router_loss, compare))
    additions_to(model)
    return "logits" if choice_for(model).known_head is None else "chunked"


def choice_for(model: nn.Module) -> LossChoice:
    """The implementation of a model's loss, chosen now if it has not been.

    Collective: all ranks of the model's mesh, the first time.
    """
    prepared = record_of(model).kept_or_new(Prepared)
    if prepared.choice is None:
        prepared.choice = LossChoice() if prepared.impl == "logits" else _chosen(model, prepared.impl)
    return prepared.choice


def additions_to(model: nn.Module) -> tuple[bool, dict[str, Any]]:
    """(whether a model's loss has a router's, arguments of its forward for that), found now if they were not.

    Raises:
        ModelLossError: If the model's own loss is not the cross entropy.

    Collective: all ranks of the model's mesh, the first time.
    """
    prepared = record_of(model).kept_or_new(Prepared)
    configs = (getattr(unwrapped(model), "config", None), text_config(model))
    configured = any(getattr(each, ROUTER_FLAG, None) is True for each in configs)
    if configured not in prepared.additions:  # the config may be changed
        prepared.additions[configured] = _found(model, prepared.router_loss, prepared.compare, configured)
    return prepared.additions[configured]


def _chosen(model: nn.Module, impl: LossImpl) -> LossChoice:
    """The loss at the head if that is proved, or full logits; all ranks of the mesh take part."""
    mesh, choice = training_mesh_of(model), LossChoice()
    # Ranks agree before the proof, because its forwards are collective, and again on its outcome.
    head, reason = fusible_head(model)
    reason = _agreed(reason, mesh)
    if head is not None and not reason:
        try:
            choice = proved(model, head)
        except ProbeError as error:
            reason = str(error)
        reason = _agreed(reason, mesh)
    if reason and impl != "auto":
        raise ModelLossError(f"the loss of {name_of(model)} cannot be computed by impl={impl!r}: {reason}")
    if this_rank() == 0:
        said = f"full logits, because {reason}" if reason else f"chunked, {choice.transform}"
        _logger.log(logging.WARNING if reason else logging.INFO, "loss of %s: %s", name_of(model), said)
    return LossChoice() if reason else choice


def _agreed(
    reason: str,
    mesh: Any,
    others: str = "{} other ranks of the mesh could not compute it from the hidden states",
) -> str:
    """This rank's reason, or ``others`` with the number of ranks that have one; empty if no rank has."""
    failed = int(sum_over_mesh([bool(reason)], mesh)[0])
    return reason or others.format(failed) * bool(failed)


def router_loss_of(model: nn.Module, has_router: bool, output: Any) -> torch.Tensor | None:
    """The router's loss in a forward's output, times its coefficient; None if it is not added.

    Raises:
        ModelLossError: If the forward returned a loss although it got no labels.
    """
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        raise ModelLossError(
            f"{name_of(model)} returned a loss although it was given no labels: something in the batch "
            f"makes it add to its loss what is not computed here. {_WAY_OUT}"
        )
    return coefficient_of(model)[1] * output.aux_loss if has_router else None


def refuse_encoder_decoder(model: nn.Module) -> None:
    """Raise for an encoder-decoder, whose labels are not shifted against its inputs."""
    if getattr(getattr(unwrapped(model), "config", None), "is_encoder_decoder", False):
        raise ModelLossError(
            f"{name_of(model)} is an encoder-decoder: its labels are not shifted against its inputs. Give "
            "train_step and evaluate a loss_fn, such as the sum that model(**batch).loss is the mean of"
        )


def coefficient_of(model: nn.Module) -> tuple[str, float]:
    """Name and value of the router's coefficient, read where the model reads it; ("", 0.0) without one."""
    inner = base_of(unwrapped(model))
    for holder in (inner, getattr(inner, "config", None), text_config(inner)):
        for name in _COEFFICIENTS:
            value = getattr(holder, name, None)
            if isinstance(value, (int, float)):
                return name, float(value)
    return "", 0.0


def name_of(model: nn.Module) -> str:
    """Class name of a model, without wrappers and as it was before it was sharded."""
    return original_class(unwrapped(model)).__name__


def _found(
    model: nn.Module, router_loss: RouterLoss | None, compare: bool, configured: bool
) -> tuple[bool, dict[str, Any]]:
    """What is added to the cross entropy: nothing, or the router's loss; all ranks of the mesh take part."""
    takes_flag = ROUTER_FLAG in forward_parameters(model)
    wanted = configured if router_loss is None else router_loss == "micro_batch"
    name, value = coefficient_of(model)
    mesh = training_mesh_of(model)
    if router_loss is None and takes_flag and not configured and value > 0 and this_rank() == 0:
        _logger.warning(
            "%s has %s=%g, and its router's loss is not trained, because its config has no "
            "output_router_logits: prepare_loss(model, router_loss='micro_batch') adds it, 'off' leaves it "
            "out without a word",
            *(name_of(model), name, value),
        )
    # The argument is passed only if it differs from the config: dense models of a family that also has
    # experts take it too.
    inputs = {ROUTER_FLAG: wanted} if takes_flag and wanted != configured else {}
    has_aux, reason = _own_loss(model, inputs) if compare else (False, "")
    if router_loss == "micro_batch" and not has_aux and not reason:
        reason = "has no router's loss (aux_loss) to add, or compare=False leaves it out"
    reason = _agreed(reason, mesh, "is another than what is computed here on {} other ranks of the mesh")
    if reason:
        raise ModelLossError(f"the own loss of {name_of(model)} {reason}. {_WAY_OUT}")
    return wanted and has_aux, inputs


def _own_loss(model: nn.Module, inputs: dict[str, Any]) -> tuple[bool, str]:
    """Compare a model's own loss in training mode with the cross entropy of its logits, on a tiny batch.

    Returns:
        (whether the model adds a router's loss, why its loss is another one or "").

    Collective: all ranks of the model's mesh, by one forward or two.
    """
    kinds = forward_parameters(model)
    if "labels" not in kinds and not any(each.kind is each.VAR_KEYWORD for each in kinds.values()):
        return False, ""
    ids = tiny_ids(model)
    # Labels in which losses may differ: unequal numbers of targets a row, special tokens, -100.
    labels = ids.roll(1, dims=0)
    for column, special in enumerate(("pad", "bos", "eos"), start=2):
        token = getattr(getattr(unwrapped(model), "config", None), f"{special}_token_id", None)
        if isinstance(token, int) and 0 <= token < getattr(text_config(model), "vocab_size", 0):
            labels[0, column] = token
    labels[0, 6] = labels[1, 1:5] = IGNORE_INDEX
    given = {"input_ids": ids, **no_cache(model), **inputs}
    try:
        with trying(model):
            model.train()
            with unmoved([compute_device(model)]):
                output = model(**given, labels=labels)
            logits: Any = getattr(output, "logits", None)
            if not isinstance(logits, torch.Tensor) or logits.shape[:2] != labels.shape:
                logits = model(**given).logits  # a fused kernel returns a loss or logits
            loss, aux = getattr(output, "loss", None), getattr(output, "aux_loss", None)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                _logger.info("loss of %s: its forward with labels returns none to compare", name_of(model))
                return False, ""
            targets = shifted(labels)
            expected = float(plain_losses(logits, targets)[0] / (targets != IGNORE_INDEX).sum())
    except ProbeError as error:
        return False, (
            f"cannot be compared, because {error}: if a forward without labels works, call "
            "prepare_loss(model, compare=False) to train the cross entropy alone"
        )
    name, coefficient = coefficient_of(model)
    has_aux = isinstance(aux, torch.Tensor) and bool(name)
    expected += coefficient * float(aux) if isinstance(aux, torch.Tensor) else 0.0
    own, near = float(loss), _TOLERANCE.get(loss.dtype, 2 * torch.finfo(loss.dtype).eps)
    broken = not math.isfinite(own) and not math.isfinite(expected)  # which a step says in its own words
    if broken or math.isclose(own, expected, rel_tol=near, abs_tol=1e-3 * near):
        return has_aux, ""
    also = f" and {name} times aux_loss" * has_aux
    return has_aux, (
        f"is not what is computed here: on a tiny batch it is {own:.6g}, and the cross entropy{also} "
        f"{expected:.6g}"
    )

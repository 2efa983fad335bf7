"""Choose how the loss of a model is computed, once, with a reason, and the same on all ranks."""

import logging
import weakref
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_sft._compat import original_class
from fsdp_sft._wrappers import unwrapped
from fsdp_sft.distributed import compute_device, mesh_of, sum_over_mesh
from fsdp_sft.errors import ModelLossError, NotFusedError
from fsdp_sft.loss import liger
from fsdp_sft.loss.additions import additions_to, refuse_meta
from fsdp_sft.loss.choice import LossChoice
from fsdp_sft.loss.head import fusible_head, takes_use_cache
from fsdp_sft.loss.probe import probe
from fsdp_sft.loss.transform import Transform, settings_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LossImpl = Literal["auto", "chunked", "liger", "logits"]

IMPLS = ("auto", "chunked", "liger", "logits")
_logger = logging.getLogger("fsdp_sft.loss")
_choices: "weakref.WeakKeyDictionary[nn.Module, dict[str, LossChoice]]" = weakref.WeakKeyDictionary()


def prepare_loss(model: nn.Module, *, impl: LossImpl = "auto") -> str:
    """Decide how ``loss_sum`` and what is built on it compute this model's loss under ``impl="auto"``.

    A fused loss needs a head that is a linear layer, with or without peft's adapters (LoRA, DoRA,
    ``modules_to_save``, trained tokens), and logits that are the head's output up to a scale and a soft cap.
    Both are found out on a tiny batch, and the fused loss is compared with that of the model's real logits
    before it is ever used. Without a call, the first ``"auto"`` loss does the same. Sharding the model,
    replacing its head or changing its scale afterwards leads to another probe. A forward or backward hook on
    the head, or on a module around it, would not see the logits: such a model gets full logits.

    Args:
        model: A decoder-only language model with its weights, sharded or not. It is left as it was: mode,
            buffers, gradients, random number generators. If sharded, it is resharded.
        impl: ``"auto"`` takes the chunked loss if it can and falls back to full logits with a logged
            warning; ``"chunked"`` and ``"liger"`` (its kernels, on CUDA) raise instead; ``"logits"``
            computes logits in full.

    Returns:
        ``"chunked"``, ``"liger"`` or ``"logits"``. Which, and why, is logged.

    Raises:
        ModelLossError: For a model whose own loss is not the cross entropy, as ``loss_sum`` says.
        ValueError: For another ``impl``, an encoder-decoder, a model on the meta device, or one whose loss
            cannot be fused although ``impl`` says so; the message has the reason.

    Collective: all ranks of the model's mesh, by three forwards of 2 x 8 tokens.
    Memory: With LoRA, DoRA or trained tokens on the head, a copy of its weight in each forward, and its
    gradient in float32 until the backward.
    """
    check_impl(impl)
    refuse_encoder_decoder(model)
    additions_to(model, None)
    choice = _decide(model, impl)
    _choices.setdefault(model, {}).update({impl: choice, "auto": choice})
    return choice.impl


def choice_for(model: nn.Module, impl: LossImpl) -> LossChoice:
    """The choice of ``impl``, made now if there is none for the model as it is.

    Collective: all ranks of the model's mesh, the first time.
    """
    choices = _choices.setdefault(model, {})
    choice = choices.get(impl)
    if choice is None or not choice.holds(model):
        choice = choices[impl] = _decide(model, impl)
    return choice


def needs_choice(model: nn.Module, impl: LossImpl) -> bool:
    """Whether this rank would choose anew in its next loss: there is no choice, or the model has changed."""
    choice = _choices.get(model, {}).get(impl)
    return impl != "logits" and (choice is None or not choice.holds(model))


def forget_choice(model: nn.Module, impl: LossImpl) -> None:
    """Choose anew in the next loss: on all ranks of the mesh, as soon as one of them has to."""
    _choices.get(model, {}).pop(impl, None)


def check_impl(impl: str) -> None:
    """Refuse an ``impl`` that there is not."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")


def refuse_encoder_decoder(model: nn.Module) -> None:
    """Raise for a model whose labels are not shifted against its inputs."""
    model = unwrapped(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelLossError(
            f"{original_class(model).__name__} is an encoder-decoder: its labels are not shifted against its "
            "inputs. Give train_step and evaluate a loss_fn, such as the sum that model(**batch).loss is the "
            "mean of"
        )


def _decide(model: nn.Module, impl: LossImpl) -> LossChoice:
    name = original_class(unwrapped(model)).__name__
    refuse_meta(model)
    mesh = mesh_of(model)
    first = mesh is None or mesh.get_rank() == 0
    if impl == "logits":
        return _logits_choice(model, "asked for")
    kind = "liger" if impl == "liger" else "chunked"
    head, reason = fusible_head(model)
    if kind == "liger":
        reason = reason or liger.why_not(compute_device(model))
    # Once before the probe, which is collective, and once after it.
    reason = _agreed_reason(reason, mesh)
    choice = None
    if head is not None and not reason:
        choice, reason = _try_fused(model, head, kind)
        reason = _agreed_reason(reason, mesh)
    if choice is not None and not reason:
        if first:
            _logger.info("loss of %s: %s, %s", name, choice.impl, choice.transform)
        return choice
    if impl != "auto":
        raise NotFusedError(f"the loss of {name} cannot be computed by impl={impl!r}: {reason}")
    if first:
        _logger.warning("loss of %s: full logits, because %s", name, reason)
    return _logits_choice(model, reason)


def _agreed_reason(reason: str, mesh: "DeviceMesh | None") -> str:
    """This rank's reason not to fuse, or that another one has one; empty if none of the mesh has."""
    failed = sum_over_mesh([bool(reason)], mesh)[0]
    return reason or (f"{int(failed)} other ranks of the mesh could not" if failed else "")


def _try_fused(model: nn.Module, head: nn.Module, impl: str) -> tuple[LossChoice | None, str]:
    def make_choice(transform: Transform) -> LossChoice:
        sharded = isinstance(unwrapped(model), FSDPModule)
        return LossChoice(impl, "", transform, weakref.ref(head), sharded, settings_of(model))

    inputs: dict[str, Any] = {"use_cache": False} if takes_use_cache(model) else {}
    try:
        return probe(model, head, make_choice, inputs), ""
    except NotFusedError as error:
        return None, str(error)


def _logits_choice(model: nn.Module, reason: str) -> LossChoice:
    head, _ = fusible_head(model)
    return LossChoice(
        "logits",
        reason,
        Transform(),
        weakref.ref(head) if head is not None else None,
        isinstance(unwrapped(model), FSDPModule),
        settings_of(model),
    )

"""Choose the implementation of a model's loss: once, with a logged reason, and the same on all ranks."""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import nn

from fsdp_sft._compat.models import original_class
from fsdp_sft._model.record import record_of
from fsdp_sft._model.sharded import training_mesh_of
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._ranks.mesh import sum_over_mesh
from fsdp_sft.errors import ModelLossError
from fsdp_sft.loss.additions import additions_to, compare_or_not, refuse_meta
from fsdp_sft.loss.choice import LossChoice
from fsdp_sft.loss.head import fusible_head
from fsdp_sft.loss.probe import ProbeError, probe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LossImpl = Literal["auto", "chunked", "logits"]

IMPLS = ("auto", "chunked", "logits")
_logger = logging.getLogger("fsdp_sft.loss")


@dataclass
class _Choices:
    """Choices for a model's forward, by ``impl``."""

    by_impl: dict[str, LossChoice] = field(default_factory=dict)


def prepare_loss(model: nn.Module, *, impl: LossImpl = "auto", compare: bool = True) -> str:
    """Choose the implementation that the model's losses use under ``impl="auto"``.

    A fused loss (one without full logits) needs a head that is a linear layer, or what peft trains of one
    (``modules_to_save``, trained tokens). The model's logits must be the head's output
    up to a scale and a soft cap. That is checked on a tiny batch, on which the fused loss must also equal
    that of the model's real logits. Forward or backward hooks on the head, or on a module around it, would
    not see the logits, so a model with such hooks gets full logits.

    Without a call, the first loss under ``"auto"`` does the same. Call this function again, on all ranks,
    after a change of the model's forward: another head, scale or loss, a hook on the head.

    Args:
        model: Decoder-only language model with its weights, sharded or not. Its mode, buffers, gradients and
            the random number generators are left as they were. A sharded model is resharded.
        impl: ``"auto"`` takes the chunked loss if possible, and full logits with a logged warning if not.
            ``"chunked"`` raises if it is not. ``"logits"`` computes full logits.
        compare: Whether to compare the model's own loss, ``model(**batch, labels=...)``, with the cross
            entropy. False trains the cross entropy alone, whatever the model's own loss is, for as long as
            its forward stays what it is: for a model whose own loss raises, or has terms that are not to be
            trained.

    Returns:
        ``"chunked"`` or ``"logits"``. The choice and its reason are logged.

    Raises:
        ModelLossError: If the model's own loss is not the cross entropy, or cannot be computed to compare it;
            see ``loss_sum``.
        ValueError: If ``impl`` is none of these, if ranks differ in arguments, if the model is an
            encoder-decoder or on the meta device, or if its loss cannot be computed by ``impl``; the message
            has the reason.

    Collective: all ranks of the model's mesh, by three forwards of 2 x 8 tokens.
    Memory: With trained tokens on the head, a copy of its weight in each forward, and its gradient in float32
    until the backward.

    Example:
        >>> fs.prepare_loss(model)
        'chunked'
    """
    check_impl(impl)
    refuse_encoder_decoder(model)
    compare_or_not(model, compare, IMPLS.index(impl))
    additions_to(model, None)
    choices = record_of(model).kept_or_new(_Choices).by_impl
    choice = _decide(model, impl)
    choices.clear()  # those for another impl may be of other numbers
    choices.update({impl: choice, "auto": choice})
    return choice.impl


def choice_for(model: nn.Module, impl: LossImpl) -> LossChoice:
    """The choice for ``impl``, made now if there is none.

    Collective: all ranks of the model's mesh, the first time.
    """
    choices = record_of(model).kept_or_new(_Choices).by_impl
    if impl not in choices:
        choices[impl] = _decide(model, impl)
    return choices[impl]


def check_impl(impl: str) -> None:
    """Raise for an unknown ``impl``."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {IMPLS} (loss_impl in train_step and evaluate), got {impl!r}")


def refuse_encoder_decoder(model: nn.Module) -> None:
    """Raise for an encoder-decoder, whose labels are not shifted against its inputs."""
    model = unwrapped(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelLossError(
            f"{original_class(model).__name__} is an encoder-decoder: its labels are not shifted against its "
            "inputs. Give train_step and evaluate a loss_fn, such as the sum that model(**batch).loss is the "
            "mean of"
        )


def _decide(model: nn.Module, impl: LossImpl) -> LossChoice:
    """Make the choice for ``impl``; all ranks of the mesh take part."""
    refuse_meta(model)
    if impl == "logits":
        return LossChoice(impl)
    name = original_class(unwrapped(model)).__name__
    mesh = training_mesh_of(model)
    first = mesh is None or mesh.get_rank() == 0
    head, reason = fusible_head(model)
    # Ranks agree before the probe, because its forwards are collective, and again on its outcome.
    reason = _agreed_reason(reason, mesh)
    choice = None
    if head is not None and not reason:
        try:
            choice = probe(model, head)
        except ProbeError as error:
            reason = str(error)
        reason = _agreed_reason(reason, mesh)
    if choice is not None and not reason:
        if first:
            _logger.info("loss of %s: %s, %s", name, choice.impl, choice.transform)
        return choice
    if impl != "auto":
        raise ModelLossError(f"the loss of {name} cannot be computed by impl={impl!r}: {reason}")
    if first:
        _logger.warning("loss of %s: full logits, because %s", name, reason)
    return LossChoice("logits")


def _agreed_reason(reason: str, mesh: "DeviceMesh | None") -> str:
    """This rank's reason not to fuse, or the number of other ranks that have one; empty if no rank has."""
    failed = sum_over_mesh([bool(reason)], mesh)[0]
    return reason or (
        f"{int(failed)} other ranks of the mesh could not compute it from the hidden states" if failed else ""
    )

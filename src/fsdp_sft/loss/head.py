"""Run a model's own forward with the loss in place of the head's product.

The model is called as usual, with all that happens between its inputs and its head: FSDP2's hooks, mixed
precision, checkpointing, compiled blocks. Only the ``forward`` of the head is replaced during that call. The
head is still called as a module. If it has its own FSDP2 group, it is gathered before the call and its
gradient is reduced after the backward. It returns the loss, and FSDP2 registers its backward hooks on that.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.compile import is_compiled
from fsdp_sft._compat.modules import foreign_hooks
from fsdp_sft._model.wrappers import replicated_by, unwrapped, with_wrappers
from fsdp_sft._process.streams import LateValues
from fsdp_sft.errors import ModelLossError
from fsdp_sft.loss.linear_head import num_logits, why_not_linear
from fsdp_sft.loss.transform import Transform, tolerance

HeadForward = Callable[[torch.Tensor], torch.Tensor]


class HeadChecks:
    """Checks of forwards, read later because the host would have to wait for them.

    If a check fails, the loss and the gradients of that forward are NaN, so that they do no harm meanwhile.
    """

    def __init__(self) -> None:
        self._sound: list[torch.Tensor] = []
        self._message = ""

    def add(self, sound: torch.Tensor, message: str) -> None:
        """Add the check of a forward.

        Args:
            sound: 0-dim bool tensor, True if the forward is as it was when its loss was prepared.
            message: Message of the error if it is not.
        """
        self._sound.append(sound)
        self._message = message

    def problem(self) -> ModelLossError | None:
        """The error of a failed check, None if all passed; the host waits for the device."""
        return None if all(LateValues(self._sound).read()) else ModelLossError(self._message)


_later: ContextVar[HeadChecks | None] = ContextVar("fsdp_sft_head_checks", default=None)


@contextmanager
def checked_later(checks: HeadChecks | None) -> Iterator[None]:
    """Collect the checks of forwards within the block in ``checks``; None checks each at once."""
    token = _later.set(checks)
    try:
        yield
    finally:
        _later.reset(token)


def fusible_head(model: nn.Module) -> tuple[nn.Module | None, str]:
    """(the head, "") if it is one linear map and no hook would see its logits, else (None, the reason)."""
    inner = unwrapped(model)
    if any(is_compiled(module) for module in with_wrappers(model)):
        return None, "the model is compiled as a whole (compile_blocks compiles its blocks)"
    get: Any = getattr(inner, "get_output_embeddings", None)
    head = get() if get is not None else None
    if not isinstance(head, nn.Module):
        return None, f"{type(inner).__name__} names no output embeddings"
    reason = why_not_linear(head) or _hooked(model, head)
    return (None, reason) if reason else (head, "")


def _hooked(model: nn.Module, head: nn.Module) -> str:
    """Why a hook prevents a fused loss (it expects logits, or sits on a part that is not called), or ""."""
    for fqn, module in model.named_modules(remove_duplicate=False):
        if module is not head:
            continue
        parts = fqn.split(".")
        outer = [".".join(parts[:end]) for end in range(len(parts))]
        inner = [name for name, inside in module.named_modules(prefix=fqn) if inside is not head]
        for name in [*outer, fqn, *inner]:
            if foreign_hooks(model.get_submodule(name), pre=name in inner):
                return f"a hook is registered on {name or 'the model'}, which would not see the logits"
    return ""


def _refuse_changed(head: nn.Module) -> None:
    """Refuse a head that was given a forward or hooks since its loss was prepared, which would be left out.

    Raises:
        ModelLossError: If it was.
    """
    reason = why_not_linear(head) or ("a hook is registered on it" if foreign_hooks(head, pre=False) else "")
    if reason:
        raise ModelLossError(
            f"the model's head has changed since its loss was prepared ({reason}): call prepare_loss(model) "
            "after the change, on all ranks"
        )


def loss_at_head(
    model: nn.Module,
    head: nn.Module,
    inputs: dict[str, Any],
    loss_of: HeadForward,
    transform: Transform,
    added_in: Callable[[Any], torch.Tensor | None] = lambda output: None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call ``model(**inputs)`` and compute the loss from the hidden states that its head is called with.

    Args:
        model: The model, sharded or not.
        head: Its output embeddings.
        inputs: Arguments of its forward, without labels.
        loss_of: Function from hidden states ``(B, S, H)`` to a scalar; it runs while the head's parameters
            are gathered.
        transform: Scale and soft cap that the forward is expected to apply to the head's output.
        added_in: Function from the forward's output to what the model adds to its loss, None if nothing.

    Returns:
        (the loss, what ``added_in`` returned).

    Raises:
        RuntimeError: If the forward does not call its head exactly once.
        ModelLossError: If the head has been given a forward or hooks, or the model does something else to its
            output than ``transform``.
    """
    _refuse_changed(head)
    inner = unwrapped(model)
    losses: list[torch.Tensor] = []
    outputs: list[Any] = []
    added: list[torch.Tensor | None] = [None]
    errors: list[Exception] = []
    forward = inner.forward

    def head_forward(hidden: torch.Tensor) -> torch.Tensor:
        try:
            losses.append(loss_of(hidden))
        # An exception that left the forward here would leave FSDP2's state in the middle of a forward. It is
        # raised after the forward has ended.
        except Exception as error:
            errors.append(error)
            losses.append(hidden.new_zeros(()))
        return losses[-1]

    def model_forward(*args: Any, **kwargs: Any) -> Any:
        outputs.append(forward(*args, **kwargs))
        try:
            added[0] = added_in(outputs[-1])
            losses[:1] = [_checked(loss, outputs[-1], transform, num_logits(head)) for loss in losses[:1]]
        except Exception as error:
            errors.append(error)
        if not losses:
            return outputs[-1]
        return losses[-1] if added[0] is None else (losses[-1], added[0])

    with (
        replaced_forward(head, head_forward),
        head.register_forward_hook(_few_logits),
        replaced_forward(inner, model_forward),
    ):
        returned = model(**inputs)
    if errors:
        raise errors[0]
    if len(losses) != 1:
        raise RuntimeError(
            f"{type(model).__name__} called its head {len(losses)} times in one forward; call "
            "prepare_loss(model) on all ranks if it was replaced"
        )
    # Under DistributedDataParallel the returned loss is taken, which is connected to the nodes that it adds
    # to the graph. FSDP2 may have cast what the call returned to its policy's output_dtype, so there the loss
    # is taken as it was computed.
    if replicated_by(model) is not None:
        return returned if added[0] is not None else (returned, None)
    return losses[0], added[0]


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace ``module.forward`` within the block, so that ``module(...)`` runs it between its hooks."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before


def _few_logits(head: nn.Module, args: tuple[torch.Tensor, ...], _loss: torch.Tensor) -> torch.Tensor:
    """Forward hook that replaces the head's result by known logits of one position.

    They cover all ids, since a model may change the logits of some. Forward hooks run in the order of their
    registration, so FSDP2's have seen the loss before.
    """
    return _known(args[0], num_logits(head)).expand(*args[0].shape[:-2], 1, -1).clone()


def _known(like: torch.Tensor, number: int) -> torch.Tensor:
    """Known logits: of both signs, large enough for a soft cap to show, and exact in every dtype.

    They are computed on the device, because the device would have to wait for a copy from the host.
    """
    steps = torch.arange(number, device=like.device) * 89 % 127 - 63
    return steps.to(like.dtype) * 0.5


def _checked(loss: torch.Tensor, output: Any, transform: Transform, number: int) -> torch.Tensor:
    """The loss, if the model has turned the known logits into what ``transform`` makes of them.

    Raises:
        ModelLossError: If it has not, or the output does not show it. If checks are read later, the loss
            becomes NaN instead.
    """
    message = (
        f"the model no longer makes {transform} of its head's output, as when its loss was prepared: a scale "
        "or a soft cap was changed, or its forward replaced. Call prepare_loss(model) after the change, on "
        "all ranks, or use impl='logits' (loss_impl= of train_step)"
    )
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.shape[-1] != number:
        raise ModelLossError(message)
    error = transform.error(_known(logits, number).expand(logits.shape), logits.detach())
    sound = error <= tolerance(logits, logits)
    later = _later.get()
    if later is not None and logits.device.type not in ("cpu", "meta"):
        later.add(sound, message)
        return loss * torch.full_like(loss.detach(), math.nan).masked_fill(sound, 1.0)
    if not bool(sound):
        raise ModelLossError(message)
    return loss

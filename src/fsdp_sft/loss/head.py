"""The head of a model: found, proved once, and then called with the loss in place of its product.

The model is called as usual, with all that happens between its inputs and its head: FSDP2's hooks, mixed
precision, checkpointing, compiled blocks. Only the ``forward`` of the head is replaced during that call. The
head is still called as a module. If it has its own FSDP2 group, it is gathered before the call and its
gradient is reduced after the backward. It returns the loss, and FSDP2 registers its backward hooks on that.

That this is the model's loss is proved at its first use, on two tiny rows. That the head is linear shows in
its structure. What the model does to the head's output, a scale or a soft cap, its config names; in the
second row the head's output is replaced by large known numbers, and what the model makes of them has to be
just that. The first row holds the real logits, whose cross entropy the loss must reproduce.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.compile import is_compiled
from fsdp_sft._compat.modules import has_hooks
from fsdp_sft._model.forward import no_cache, probed
from fsdp_sft._model.published import computing
from fsdp_sft._model.sharded import compute_device
from fsdp_sft._model.twin import text_config
from fsdp_sft._model.view import base_of, original_class, replicated_by, unwrapped, with_wrappers
from fsdp_sft.experts import counter_of
from fsdp_sft.loss.blocks import AS_IT_IS, Transform
from fsdp_sft.loss.linear import head_losses
from fsdp_sft.loss.plain import plain_losses, wide_dtype
from fsdp_sft.targets import IGNORE_INDEX

Compute = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# What configs call the factor of the logits, or its inverse, and their soft cap.
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_KNOWN_SIZE = 20.0  # standard deviation of the known numbers; large enough for a soft cap to show
# Largest relative error of the fused loss. It leaves room for TF32, because scale and soft cap have been
# checked more exactly before.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


class ProbeError(Exception):
    """A forward that was tried has failed, or does not show what was looked for; the message says why."""


@dataclass(frozen=True)
class LossChoice:
    """The chosen implementation of one model's loss.

    Attributes:
        transform: Scale and soft cap that a fused loss applies to the head's output.
        known_head: Head whose forward a fused loss replaces; None for full logits.
    """

    transform: Transform = AS_IT_IS
    known_head: "weakref.ref[nn.Module] | None" = None

    @property
    def head(self) -> nn.Module | None:
        """The head; None where full logits are computed, as hooks on its gradients need."""
        head = None if self.known_head is None else self.known_head()
        return None if head is None or has_hooks(head) else head


def fusible_head(model: nn.Module) -> tuple[nn.Module | None, str]:
    """(the head, "") if it is one linear map that is called by itself, else (None, the reason)."""
    inner = unwrapped(model)
    if any(is_compiled(module) for module in with_wrappers(model)):
        return None, "the model is compiled as a whole (compile_blocks compiles its blocks)"
    get: Any = getattr(inner, "get_output_embeddings", None)
    head = get() if get is not None else None
    if not isinstance(head, nn.Module):
        return None, f"{type(inner).__name__} names no output embeddings"
    reason = _why_not_linear(head)
    return (None, f"its head is not a plain nn.Linear: {reason}") if reason else (head, "")


def _why_not_linear(head: nn.Module) -> str:
    """Why a head is no product with its weight; empty if it is one."""
    own = computing(head)
    for module in (head, own):
        if "forward" in vars(module) or is_compiled(module) or has_hooks(module):
            return (
                f"the forward of {original_class(module).__name__} is replaced, or its gradients are hooked"
            )
    cls = original_class(own)
    if cls.forward is not nn.Linear.forward:
        return f"it computes something else ({cls.__module__}.{cls.__name__})"
    others = {name for name, _ in own.named_parameters()} - {"weight", "bias"}
    return f"it has parameters of its own: {', '.join(sorted(others))}" if others else ""


def proved(model: nn.Module, head: nn.Module) -> LossChoice:
    """A choice whose loss equals that of the real logits on a tiny batch.

    The model's mode, buffers and gradients and the random number generators are left as they were, and the
    model is resharded.

    Args:
        model: Model with its weights.
        head: Its head, for which ``fusible_head`` gives no reason against a fused loss.

    Raises:
        ProbeError: If it does not give that loss.

    Collective: all ranks of the model's mesh, by two forwards.
    """
    ids = tiny_ids(model)
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = IGNORE_INDEX
    targets[1] = IGNORE_INDEX  # the second row shows the transform and has no real logits
    inputs = {"input_ids": ids, **no_cache(model)}
    with trying(model):
        raw, logits = _observe(model, head, inputs)
        choice = LossChoice(_transform_of(model, raw, logits), weakref.ref(head))
        expected, _ = plain_losses(logits[:1], targets[:1])
        actual = loss_at_head(model, choice, head, inputs, partial(head_losses, labels=targets)).loss
    error = float((actual - expected).abs() / expected.abs().clamp_min(1e-6))
    if not error <= _TOLERANCE.get(raw.dtype, 1e-2):
        raise ProbeError(f"the fused loss differs from that of the logits by {error:.1e}, relatively")
    return choice


def tiny_ids(model: nn.Module) -> torch.Tensor:
    """Two short rows of ids on a model's device, int64 ``(2, 8)``."""
    embedding = getattr(unwrapped(model), "get_input_embeddings", lambda: None)()
    rows = getattr(embedding, "num_embeddings", None) or 19
    return torch.arange(3, 19, device=compute_device(model)).view(2, 8) % rows


@contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, compiled code and counts; afterwards the model is as it was.

    Raises:
        ProbeError: For any error inside but a lack of memory; what it has left in FSDP2's state is dropped.
    """
    counter = counter_of(model)
    uncounted = nullcontext() if counter is None else counter.paused()
    try:
        with probed(model), uncounted:
            yield
    except (torch.OutOfMemoryError, ProbeError):
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise ProbeError(f"the probe failed: {type(error).__name__}: {first}") from error


def _observe(model: nn.Module, head: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(the output of the head, the logits that the model returned), both ``(2, S, V)``."""
    raw: list[torch.Tensor] = []
    own_head = head.forward

    def head_forward(hidden: torch.Tensor) -> torch.Tensor:
        logits = own_head(hidden)
        known = _KNOWN_SIZE * torch.randn(logits.shape[1:], generator=torch.Generator().manual_seed(0))
        raw.append(torch.stack([logits[0], known.to(logits)]))
        return raw[-1]

    with replaced_forward(head, head_forward):
        logits = model(**inputs).logits
    if len(raw) != 1:
        raise ProbeError(f"the forward calls the head {len(raw)} times")
    return raw[0], logits


def _transform_of(model: nn.Module, raw: torch.Tensor, logits: torch.Tensor) -> Transform:
    """The scale and soft cap, of those that the config names, that turn ``raw`` into ``logits``."""
    inner: Any = base_of(unwrapped(model))
    holders = (text_config(inner), getattr(inner, "config", None), inner)
    named = {
        name: float(getattr(one, name))
        for one in holders
        for name in (*_SCALES, *_SOFT_CAPS)
        if isinstance(getattr(one, name, None), (int, float)) and getattr(one, name) > 0
    }
    factors = [named[name] for name in _SCALES if name in named]
    scales = [1.0, *factors, *(1 / factor for factor in factors)]  # some families divide
    soft_caps = [None, *(named[name] for name in _SOFT_CAPS if name in named)]
    wide, errors = logits.to(wide_dtype(logits)), dict[Transform, float]()
    for one in (Transform(scale, cap) for scale in scales for cap in soft_caps):
        made = raw.to(wide_dtype(raw), copy=True)
        one.of_(made)
        errors[one] = float((made - wide).abs().max() / wide.abs().max())
    best = min(errors, key=lambda one: errors[one])
    # What rounding can explain.
    if not errors[best] <= 16 * max(torch.finfo(raw.dtype).eps, torch.finfo(logits.dtype).eps):
        raise ProbeError(
            "what the model does to its head's output is neither a scale nor a soft cap of its config "
            f"(off by {errors[best]:.1e} of the largest logit)"
        )
    return best


class Forward:
    """One forward of a model that returns its loss, computed where the model calls its head: the result.

    Attributes:
        loss: The loss, or the losses of tokens.
        correct: Number of targets whose logit is the largest.
        added: What the model adds to its loss; None for nothing.
        calls: Number of calls of the head.
    """

    def __init__(
        self, compute: Compute, added_in: Callable[[Any], torch.Tensor | None], choice: LossChoice
    ) -> None:
        self._compute, self._added_in, self._transform = compute, added_in, choice.transform
        self.loss = self.correct = torch.empty(())
        self.added: torch.Tensor | None = None
        self.calls = self._num_logits = 0

    def of_head(self, head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """The loss, in place of the head's product."""
        self.calls += 1
        # FSDP2 replaces the head's parameters when it gathers them, so they are looked up at each call.
        own = computing(head)
        self._num_logits = own.weight.shape[0]
        self.loss, self.correct = self._compute(
            hidden=hidden, weight=own.weight, bias=own.bias, transform=self._transform
        )
        return self.loss

    def few_logits(
        self, head: nn.Module, args: tuple[torch.Tensor, ...], _loss: torch.Tensor
    ) -> torch.Tensor:
        """Forward hook that replaces the head's result by logits of one position for what follows.

        They cover all ids, since a model may change the logits of some. Forward hooks run in the order of
        their registration, so FSDP2's have seen the loss before.
        """
        return args[0].new_zeros(*args[0].shape[:-2], 1, self._num_logits)

    def of_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The loss, and what the model adds to it, in place of the model's output."""
        output = forward(*args, **kwargs)
        self.added = self._added_in(output)
        return self.loss if self.added is None else (self.loss, self.added)


def loss_at_head(
    model: nn.Module,
    choice: LossChoice,
    head: nn.Module,
    inputs: dict[str, Any],
    compute: Compute,
    added_in: Callable[[Any], torch.Tensor | None] = lambda output: None,
) -> Forward:
    """Call ``model(**inputs)`` and compute the loss from the hidden states that its head is called with.

    Args:
        model: The model, sharded or not.
        choice: What is known of its head.
        head: Its output embeddings.
        inputs: Arguments of its forward, without labels.
        compute: Function ``compute(hidden=, weight=, bias=, transform=)`` from hidden states ``(B, S, H)`` to
            (the loss, the number of correct targets); it runs while the head's parameters are gathered.
        added_in: Function from the forward's output to what the model adds to its loss, None if nothing.

    Raises:
        RuntimeError: If the forward does not call its head exactly once.
    """
    inner = unwrapped(model)
    forward = Forward(compute, added_in, choice)
    with (
        replaced_forward(head, partial(forward.of_head, head)),
        head.register_forward_hook(forward.few_logits),
        replaced_forward(inner, partial(forward.of_model, inner.forward)),
    ):
        returned = model(**inputs)
    if forward.calls != 1:
        raise RuntimeError(
            f"{type(model).__name__} called its head {forward.calls} times in one forward; call "
            "prepare_loss(model) on all ranks if it was replaced"
        )
    # Under DistributedDataParallel the returned loss is taken, which is connected to the nodes that it adds
    # to the graph. FSDP2 may have cast what the call returned to its policy's output_dtype, so there the loss
    # is taken as it was computed.
    if replicated_by(model) is not None:
        forward.loss, forward.added = (returned, None) if forward.added is None else returned
    return forward


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace ``module.forward`` within the block, so that ``module(...)`` runs it between its hooks."""
    own = vars(module)
    before = {name: own[name] for name in ("forward",) if name in own}
    own["forward"] = forward
    try:
        yield
    finally:
        del own["forward"]
        own.update(before)

"""Observe on a tiny batch what a model does to its head's output, and prove a fused loss equal to its own.

That the head is linear shows in its structure. What the model does to the head's output has to be observed.
The model's own forward runs with its own head on two rows, except that in the second row the head's output is
replaced by large known numbers. That row of the output shows scale and soft cap. The first row holds the real
logits, whose cross entropy the fused loss must reproduce.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_sft._model.inputs import no_cache
from fsdp_sft._model.preserved import preserved, uncompiled
from fsdp_sft._model.sharded import compute_device
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft.experts import counter_of
from fsdp_sft.loss.choice import LossChoice
from fsdp_sft.loss.head import checked_later, loss_at_head, replaced_forward
from fsdp_sft.loss.linear_head import num_logits
from fsdp_sft.loss.transform import Transform, candidates, tolerance, wide
from fsdp_sft.targets import IGNORE_INDEX

if TYPE_CHECKING:
    pass

_LENGTH = 8
_KNOWN_SIZE = 20.0  # standard deviation of the known numbers; large enough for a soft cap to show
# Largest relative error of the fused loss. It leaves room for TF32, because scale and soft cap have been
# checked more exactly before.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


def probe(model: nn.Module, head: nn.Module) -> LossChoice:
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
    device = compute_device(model)
    ids = torch.arange(3, 3 + 2 * _LENGTH, device=device).view(2, -1) % num_logits(head)
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = IGNORE_INDEX
    targets[1] = IGNORE_INDEX  # the second row shows the transform and has no real logits
    inputs = {"input_ids": ids, **no_cache(model)}
    with evaluating(model):
        raw, logits = _observe(model, head, inputs)
        choice = LossChoice("chunked", _transform(model, raw, logits), weakref.ref(head))
        expected = F.cross_entropy(wide(logits[0]), targets[0], reduction="sum", ignore_index=IGNORE_INDEX)
        actual = guarded(
            model,
            lambda: loss_at_head(model, head, inputs, choice.loss_of(head, targets), choice.transform)[0],
        )
    error = float((actual - expected).abs() / expected.abs().clamp_min(1e-6))
    if not error <= _TOLERANCE.get(raw.dtype, 1e-2):
        raise ProbeError(f"the fused loss differs from that of the logits by {error:.1e}, relatively")
    return choice


def _observe(model: nn.Module, head: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(the output of the head, the logits that the model returned), both ``(2, S, V)``."""
    raw: list[torch.Tensor] = []
    own_head = head.forward

    def head_forward(hidden: torch.Tensor) -> torch.Tensor:
        logits = own_head(hidden)
        raw.append(logits)
        if logits.shape[:2] == inputs["input_ids"].shape:
            generator = torch.Generator().manual_seed(0)
            known = _KNOWN_SIZE * torch.randn(logits.shape[1:], generator=generator)
            raw[-1] = torch.stack([logits[0], known.to(logits)])
        return raw[-1]

    with replaced_forward(head, head_forward):
        output = output_of(model, inputs)
    if len(raw) != 1:
        raise ProbeError(f"the forward calls the head {len(raw)} times")
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise ProbeError("the forward returns no logits")
    if logits.shape != raw[0].shape or logits.shape[:2] != inputs["input_ids"].shape:
        raise ProbeError(
            f"the head returns {tuple(raw[0].shape)} and the model {tuple(logits.shape)} for input_ids "
            f"{tuple(inputs['input_ids'].shape)}"
        )
    return raw[0], logits


def _transform(model: nn.Module, raw: torch.Tensor, logits: torch.Tensor) -> Transform:
    """The scale and soft cap, among those that the config suggests, that turn ``raw`` into ``logits``."""
    errors = {candidate: float(candidate.error(raw, logits)) for candidate in candidates(model)}
    best = min(errors, key=lambda candidate: errors[candidate])
    if not errors[best] <= tolerance(raw, logits):
        raise ProbeError(
            "what the model does to its head's output is neither a scale nor a soft cap of its config "
            f"(off by {errors[best]:.1e} of the largest logit)"
        )
    return best


class ProbeError(Exception):
    """A forward that was tried has failed, or does not show what was looked for; the message says why."""


def output_of(
    model: nn.Module, inputs: dict[str, Any], within: AbstractContextManager[Any] | None = None
) -> Any:
    """Output of ``model(**inputs)`` before FSDP2 casts it; its own forward is run ``within`` a context.

    Raises:
        ProbeError: As ``guarded``.
    """
    outputs: list[Any] = []
    inner = unwrapped(model)
    forward = inner.forward

    def model_forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        with within or nullcontext():
            outputs.append(forward(*args, **kwargs))
        return torch.zeros(())

    with replaced_forward(inner, model_forward):
        guarded(model, lambda: model(**inputs))
    return outputs[0]


def guarded(model: nn.Module, call: Any) -> Any:
    """``call()``; an error inside it, but for lack of memory, is raised when FSDP2's hooks have run.

    An exception that left the root's forward would leave FSDP2's state in the middle of it.

    Raises:
        ProbeError: With the first error.
    """
    inner = unwrapped(model)
    errors: list[Exception] = []
    forward = inner.forward

    def model_forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            errors.append(error)
            return torch.zeros(())

    with replaced_forward(inner, model_forward):
        try:
            result = call()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            errors.append(error)
    if errors:
        _end_forwards(model)
        first = str(errors[0]).strip().split("\n")[0]
        raise ProbeError(f"the probe failed: {type(errors[0]).__name__}: {first}") from errors[0]
    return result


def _end_forwards(model: nn.Module) -> None:
    """Reset FSDP2's state after an error inside a block has broken off a forward (torch 2.13 or later)."""
    reset = getattr(model, "reset_iter_state", None)
    if reset is not None:
        # RuntimeError if it is not the outermost FSDP2 module, AttributeError before its first forward.
        with suppress(RuntimeError, AttributeError):
            reset()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, compiled code and counts; afterwards the model is as it was."""
    counter = counter_of(model)
    uncounted = nullcontext() if counter is None else counter.paused()
    with preserved(model), torch.no_grad(), uncompiled(), checked_later(None), uncounted:
        model.eval()
        yield

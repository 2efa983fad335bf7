"""Loss and entropy of each row of a linear head, holding the logits of one chunk of rows at a time.

The weight of a row's loss is known in the backward only. If nothing but the hidden states needs a gradient,
it is a factor of their rows, and the forward keeps their gradient as that of the sum does
(``linear_cross_entropy``). The gradient of the head's weight is a sum over rows, so the backward computes the
logits a second time, which is one product in four.
"""

from typing import Any

import torch

from fsdp_sft.loss.chunks import (
    Head,
    HeadGradients,
    as_computed,
    blocks_of_logits,
    check_operands,
    check_options,
    default_chunk_size,
    refuse_second_derivative,
    targets_in,
    wide_dtype,
)
from fsdp_sft.loss.counting import Targets
from fsdp_sft.loss.linear_cross_entropy import losses_of
from fsdp_sft.loss.products import products_for
from fsdp_sft.loss.terms import PLAIN

# Slopes of an entropy are p * (log p + H), at most 10 in size for the largest vocabularies.
_MOST_OF_ENTROPY = 16.0


def linear_token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    known: Targets | None = None,
    entropy: bool = False,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """``cross_entropy(cap(scale * (hidden @ weight.T + bias)), labels, reduction="none")``, chunk by chunk.

    Args:
        hidden: Hidden states ``(..., H)``.
        weight: Weight of the head, ``(V, H)``, of the dtype and on the device of ``hidden``.
        labels: Target ids, int64 ``(...)``, each -100 or in ``[0, V)``.
        bias: Bias of the head, ``(V,)``, or None.
        softcap: Soft cap of the scaled logits; None for none.
        scale: Factor of the logits.
        known: Facts about the labels that the host knows; None makes it wait for a device.
        entropy: Whether the entropies are wanted, too.
        chunk_size: Number of rows whose logits exist at once; None takes ``default_chunk_size``.

    Returns:
        ``(1, ...)``, or ``(2, ...)`` with the entropies second: float32 (float64 for float64), 0 where the
        label is -100, connected to the inputs even without a target.
    """
    check_operands(hidden, weight, labels, bias)
    chunk_size = default_chunk_size(hidden.shape[-1], hidden.dtype) if chunk_size is None else chunk_size
    check_options(softcap, scale, chunk_size)
    hidden, weight, bias = as_computed(hidden, weight, bias)
    apply: Any = _LinearTokenLosses.apply
    if torch.compiler.is_compiling():
        # The number of rows that count is known at run time only, so the compiled graph breaks here.
        apply = torch.compiler.disable(apply)
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), labels.to(hidden.device)
    options = (softcap, scale, entropy, chunk_size)
    with torch.autocast(hidden.device.type, enabled=False):
        values: torch.Tensor = apply(rows, weight, bias, labels, known, options, torch.is_grad_enabled())
    return values


class _LinearTokenLosses(torch.autograd.Function):
    """Losses and entropies of N rows, ``(1, ...)`` or ``(2, ...)`` in the shape of the labels.

    They are no view: FSDP2 puts hooks on what a head returns, and warns if it is one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        known: Targets | None,
        options: tuple[float | None, float, bool, int],
        grad_enabled: bool,
    ) -> torch.Tensor:
        softcap, scale, entropy, chunk_size = options
        wanted = [needed and grad_enabled for needed in ctx.needs_input_grad[:3]]
        head = Head(weight, bias, softcap, scale)
        found = hidden.new_zeros(1 + entropy, *labels.shape, dtype=wide_dtype(hidden))
        values, labels = found.view(1 + entropy, -1), labels.reshape(-1)
        positions = targets_in(labels, weight.shape[0], known)
        products = products_for(weight, min(chunk_size, len(positions)))
        # Kept is the gradient of the hidden states for weights of 1, or what it takes to compute all again.
        ctx.keeps = wanted == [True, False, False] and not entropy
        kept = HeadGradients(hidden, head, [ctx.keeps, False, False], products.gain)
        for index, logits in blocks_of_logits(
            hidden, head, positions, chunk_size, products, labels=labels, gradients=kept
        ):
            columns = labels[index, None]
            if entropy:
                head.transform_(logits, keep=False)
                values[:, index] = torch.cat(_loss_and_entropy(logits, columns)[:2], 1).T.to(values.dtype)
            else:
                losses = losses_of(logits, columns, head, PLAIN, None, ctx.keeps)
                values[0, index] = losses.squeeze(1).to(values.dtype)
        ctx.wanted, ctx.options, ctx.gain = wanted, options, products.gain
        if ctx.keeps:
            ctx.save_for_backward(kept.hidden)
        elif any(wanted):
            ctx.save_for_backward(hidden, weight, bias, labels, positions)
        ctx.dtype = hidden.dtype
        return found

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivative("token_losses")
        none = (None,) * 4
        grad_output = grad_output.flatten(1)
        scale = ctx.options[1]
        if ctx.keeps:
            (kept,) = ctx.saved_tensors
            factor = (grad_output[0] * (scale / ctx.gain)).unsqueeze(1)
            out = torch.empty_like(kept, dtype=ctx.dtype)
            return (torch.mul(kept, factor, out=out), None, None, *none)
        hidden, weight, bias, labels, positions = ctx.saved_tensors
        softcap, scale, _, chunk_size = ctx.options
        head = Head(weight, bias, softcap, scale)
        with torch.autocast(hidden.device.type, enabled=False):
            gradients, factor = _weighted(
                hidden, head, labels, positions, chunk_size, grad_output, ctx.wanted
            )
        return (*gradients.scaled(factor, ctx.dtype), *none)


def _weighted(
    hidden: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    positions: torch.Tensor,
    chunk_size: int,
    weights: torch.Tensor,
    wanted: list[bool],
) -> tuple[HeadGradients, torch.Tensor]:
    """(the gradients for rows whose losses and entropies have ``weights``, the factor that they lack).

    Args:
        hidden: Hidden states ``(N, H)``.
        head: The head.
        labels: Targets ``(N,)``.
        positions: Indices of the rows that count.
        chunk_size: Number of rows whose logits exist at once.
        weights: ``(1, N)``, of the losses, or ``(2, N)``, with those of the entropies.
        wanted: Whether the gradients of hidden states, weight and bias are wanted.
    """
    products = products_for(head.weight, min(chunk_size, len(positions)))
    gain, largest = products.gain, weights.new_ones(())
    if gain != 1:
        # Float16 slopes lie below the gain if no weight exceeds 1. A mean's weights, and a GradScaler's, do
        # not have that size; their largest comes back in the factor.
        largest = weights.abs().amax().clamp_min(torch.finfo(weights.dtype).tiny)
        weights = weights / largest
        gain = gain / (_MOST_OF_ENTROPY if len(weights) > 1 else 1.0)
    gradients = HeadGradients(hidden, head, wanted, gain)
    for index, logits in blocks_of_logits(
        hidden, head, positions, chunk_size, products, labels=labels, gradients=gradients
    ):
        columns, own = labels[index, None], weights[:, index, None].to(logits.dtype)
        if len(weights) == 1:
            losses_of(logits, columns, head, PLAIN, own[0], True)
            continue
        tanh = head.transform_(logits, keep=True)
        _, entropies, logs = _loss_and_entropy(logits, columns)
        # d loss / d x_j = p_j - [j = t], d entropy / d x_j = -p_j (log p_j + entropy)
        logits.mul_(logs.add_(entropies).mul_(-own[1]).add_(own[0]))
        logits.scatter_add_(1, columns, -own[0])
        if tanh is not None:
            logits.mul_(tanh.square_().neg_().add_(1))
    return gradients, largest * head.scale / gain


def _loss_and_entropy(
    logits: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses ``(C, 1)``, entropies ``(C, 1)``, logarithms of the probabilities), and ``logits`` as those.

    The entropy of a row with probabilities p is ``-sum(p * log p)``.
    """
    logs = torch.log_softmax(logits, -1)
    torch.exp(logs, out=logits)
    return -logs.gather(1, columns), -(logits * logs).sum(-1, keepdim=True), logs

"""Losses of a linear head that hold the logits of one chunk of rows at a time; ``plain`` is what they equal.

The gradients of a sum are computed in the forward, while a chunk's logits exist, and kept until the backward,
which multiplies them by ``grad_output`` before it rounds them to the dtype of the inputs: a ``GradScaler``
prevents underflow as it does for ordinary logits.

The weight of a single row's loss is known in the backward only. If nothing but the hidden states needs a
gradient, it is a factor of their rows, and the forward keeps their gradient as that of the sum does. The
gradient of the head's weight is a sum over rows, so there the backward computes the logits a second time,
which is one product in four.
"""

from typing import Any

import torch

from fsdp_sft.loss.blocks import AS_IT_IS, Head, HeadGradients, Transform, losses_by_block
from fsdp_sft.loss.counting import Targets, facts_of
from fsdp_sft.loss.plain import PLAIN, Terms, wide_dtype
from fsdp_sft.targets import IGNORE_INDEX


def linear_cross_entropy_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    weights: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """``cross_entropy(cap(scale * (hidden @ weight.T + bias)), labels, reduction="sum")``, chunk by chunk.

    Nothing is shifted: ``labels[i]`` is the target of ``hidden[i]`` (``loss_sum`` shifts). Rows with label
    -100 are dropped before any product.

    Args:
        hidden: Hidden states ``(..., H)``, floating point.
        weight: Weight of the head, ``(V, H)``, of the dtype and on the device of ``hidden``; an ordinary
            tensor, not a DTensor.
        labels: Target ids, int64 ``(...)``, each -100 or in ``[0, V)``.
        bias: Bias of the head, ``(V,)``, of the same dtype; None for none.
        chunk_size: Number of rows whose logits exist at once; None takes H / 2 (H for dtypes below float32),
            but at least 128 and at most 1024.
        softcap: Soft cap of the scaled logits, ``cap(x) = softcap * tanh(x / softcap)``; None for none.
        scale: Factor of the logits; None is 1.
        weights: Factors of the labels' losses, floating point ``(...)``. They get no gradient, and those of
            label -100 are not read. None is 1.
        label_smoothing: Label smoothing, defined as in ``torch.nn.functional.cross_entropy``.
        z_loss: Factor of the z-loss, the squared logarithm of the softmax's denominator, which is added to
            each label's loss.

    Returns:
        A float32 scalar (float64 for float64), connected to the inputs even without a target. Its backward
        can run once, and has no derivative of its own.

    Raises:
        ValueError: If labels or weights do not fit the rows or the vocabulary, or a term is out of range.
        RuntimeError: In a second backward, because the first gives the kept gradients away.

    Memory: In the forward ``chunk_size * V`` logits. They are bfloat16 if the inputs are and the device has
    no products of bfloat16 with float32 results (as a CPU has none); if not, they are float32. On CUDA a
    soft cap takes them twice, and inputs below float32 half of it again. Until the backward, the gradients of
    those inputs that need one, in float32.

    Example:
        >>> hidden, weight = torch.randn(6, 16), torch.randn(32, 16)
        >>> labels = torch.tensor([3, 7, -100, 1, 4, 9])
        >>> loss = fs.linear_cross_entropy_sum(hidden, weight, labels)
        >>> logits = hidden @ weight.T
        >>> expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        >>> torch.allclose(loss, expected)
        True
    """
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(
            f"weights must be of the shape of labels {tuple(labels.shape)}, got {tuple(weights.shape)}"
        )
    return head_losses(
        hidden,
        weight,
        labels,
        bias=bias,
        transform=Transform(1.0 if scale is None else scale, softcap),
        weights=weights,
        terms=Terms(label_smoothing=label_smoothing, z_loss=z_loss),
        chunk_size=chunk_size,
    )[0]


def head_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transform: Transform = AS_IT_IS,
    known: Targets | None = None,
    weights: torch.Tensor | None = None,
    terms: Terms = PLAIN,
    summed: bool = True,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``plain_losses`` of a head's logits, chunk by chunk, in the dtype of autocast where that is on.

    Args:
        hidden: Hidden states ``(..., H)``.
        weight: Weight of the head, ``(V, H)``, of the dtype and on the device of ``hidden``.
        labels: Target ids, int64 ``(...)``, each -100 or in ``[0, V)``.
        bias: Bias of the head, ``(V,)``, or None.
        transform: Scale and soft cap of the logits.
        known: Facts about the labels that the host knows; None makes it wait for a device.
        weights: Factors of the labels' losses in a sum, ``(...)``; None is 1.
        terms: Definition of the loss.
        summed: Whether the loss is summed; if not, it is ``(...)``, and the plain one.
        chunk_size: Number of rows whose logits exist at once; None takes ``default_chunk_size``.

    Raises:
        ValueError: If there is not one label for each row.
    """
    if labels.dtype != torch.int64 or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must be int64 of shape {tuple(hidden.shape[:-1])}, one for each row of hidden, got "
            f"{labels.dtype} {tuple(labels.shape)}"
        )
    device = hidden.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    weights = None if weights is None else weights.detach().reshape(-1).to(device)
    chunk_size = default_chunk_size(hidden.shape[-1], hidden.dtype) if chunk_size is None else chunk_size
    apply: Any = _HeadLosses.apply
    if torch.compiler.is_compiling():
        # The number of rows that count is known at run time only, so the compiled graph breaks here.
        apply = torch.compiler.disable(apply)
    options = (labels.to(device), known, chunk_size, transform, terms, weights, summed)
    with torch.autocast(device.type, enabled=False):
        result: tuple[torch.Tensor, torch.Tensor] = apply(
            hidden.reshape(-1, hidden.shape[-1]), weight, bias, *options, torch.is_grad_enabled()
        )
    return result


def default_chunk_size(width: int, dtype: torch.dtype) -> int:
    """Default number of rows per chunk: enough for efficient products, with few logits at once."""
    return min(1024, max(128, 2 * width // dtype.itemsize))


def targets_in(labels: torch.Tensor, vocabulary: int, known: Targets | None) -> torch.Tensor:
    """Positions of the labels that are not -100, ascending; raises if one is out of range."""
    known = facts_of(labels, labels.device) if known is None else known
    if known.lowest < 0 or known.highest >= vocabulary:
        raise ValueError(
            f"labels must be {IGNORE_INDEX} or in [0, {vocabulary}), got "
            f"{known.lowest if known.lowest < 0 else known.highest}; "
            "the vocabulary is the number of rows of the weight"
        )
    return known.positions


class _HeadLosses(torch.autograd.Function):
    """``head_losses`` of rows ``(N, H)``; its results are no views, on which FSDP2 could put no hooks.

    Gradients of a sum that were computed in the backward alone would need the logits of every chunk again:
    stored, which is what chunks avoid, or recomputed by one more product. Since the sum is a scalar, the
    forward already knows the gradients up to one factor, ``grad_output``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        known: Targets | None,
        chunk_size: int,
        transform: Transform,
        terms: Terms,
        weights: torch.Tensor | None,
        summed: bool,
        grad_enabled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = [needed and grad_enabled for needed in ctx.needs_input_grad[:3]]
        ctx.wanted, ctx.chunk_size, ctx.transform, ctx.dtype = wanted, chunk_size, transform, hidden.dtype
        keeps = summed or not any(wanted[1:])
        head, flat, wide = Head(weight, bias, transform), labels.reshape(-1), wide_dtype(hidden)
        positions = targets_in(flat, weight.shape[0], known)
        gradients = HeadGradients(hidden, head, wanted if keeps else [False] * 3)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        each = hidden.new_zeros(() if summed else labels.shape, dtype=wide)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for index, losses, is_largest in losses_by_block(
            hidden, head, flat, positions, chunk_size, gradients, terms, weights
        ):
            correct += is_largest.sum()
            if summed:
                total += losses.sum(dtype=torch.float64)
            else:
                each.view(-1)[index] = losses.squeeze(1).to(wide)
        ctx.gradients = gradients if keeps else None
        if not keeps:
            ctx.save_for_backward(hidden, weight, bias, flat, positions)
        ctx.mark_non_differentiable(correct)
        return total.to(wide) if summed else each, correct

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor, _of_correct: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # the kept gradients would count as constants
            raise RuntimeError(
                "a loss without logits has no derivative of its gradient (create_graph=True): call "
                "prepare_loss(model, impl='logits') before it"
            )
        # They leave ``ctx``, so that each is freed as soon as it has been rounded to its input's dtype.
        gradients, ctx.gradients = ctx.gradients, None
        factor: torch.Tensor | float = grad_output.reshape(-1, 1) if grad_output.ndim else grad_output
        if ctx.saved_tensors:
            hidden, weight, bias, labels, positions = ctx.saved_tensors
            head, factor = Head(weight, bias, ctx.transform), 1.0
            gradients = HeadGradients(hidden, head, ctx.wanted)
            with torch.autocast(hidden.device.type, enabled=False):
                for _ in losses_by_block(
                    hidden,
                    head,
                    labels,
                    positions,
                    ctx.chunk_size,
                    gradients,
                    terms=PLAIN,
                    weights=grad_output.reshape(-1),
                ):
                    pass
        if gradients is None:
            raise RuntimeError(
                "linear_cross_entropy_sum: a second backward through the same loss; the first gave its "
                "gradients away. Compute the loss again, or sum losses and call backward once"
            )
        return (*gradients.scaled(factor, ctx.dtype), *(None,) * 8)

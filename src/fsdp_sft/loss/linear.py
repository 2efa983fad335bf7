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

from fsdp_sft.loss.blocks import (
    AS_IT_IS,
    Head,
    HeadGradients,
    Transform,
    blocks_of_logits,
    loss_and_entropy,
    losses_of,
    wide_dtype,
)
from fsdp_sft.loss.counting import Targets, facts_of
from fsdp_sft.loss.plain import PLAIN, Terms
from fsdp_sft.loss.products import products_for
from fsdp_sft.targets import IGNORE_INDEX

# Slopes of an entropy are p * (log p + H), at most 10 in size for the largest vocabularies.
_MOST_OF_ENTROPY = 16.0


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
    return chunked_loss(
        hidden,
        weight,
        labels,
        bias=bias,
        transform=Transform(1.0 if scale is None else scale, softcap),
        weights=weights,
        terms=Terms(label_smoothing=label_smoothing, z_loss=z_loss),
        chunk_size=chunk_size,
    )[0]


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transform: Transform = AS_IT_IS,
    known: Targets | None = None,
    weights: torch.Tensor | None = None,
    terms: Terms = PLAIN,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``linear_cross_entropy_sum``, ``num_correct``); no wait for the device if targets are ``known``."""
    weights = None if weights is None else weights.detach().reshape(-1).to(hidden.device)
    result: tuple[torch.Tensor, torch.Tensor] = _applied(
        _LinearCrossEntropySum, hidden, weight, bias, labels, known, chunk_size, transform, (terms, weights)
    )
    return result


def linear_token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transform: Transform = AS_IT_IS,
    known: Targets | None = None,
    entropy: bool = False,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """``plain_token_losses`` of a head's logits, chunk by chunk.

    Args:
        hidden: Hidden states ``(..., H)``.
        weight: Weight of the head, ``(V, H)``, of the dtype and on the device of ``hidden``.
        labels: Target ids, int64 ``(...)``, each -100 or in ``[0, V)``.
        bias: Bias of the head, ``(V,)``, or None.
        transform: Scale and soft cap of the logits.
        known: Facts about the labels that the host knows; None makes it wait for a device.
        entropy: Whether the entropies are wanted, too.
        chunk_size: Number of rows whose logits exist at once; None takes ``default_chunk_size``.

    Returns:
        ``(1, ...)``, or ``(2, ...)`` with the entropies second: float32 (float64 for float64), 0 where the
        label is -100, connected to the inputs even without a target.
    """
    values: torch.Tensor = _applied(
        _LinearTokenLosses, hidden, weight, bias, labels, known, chunk_size, transform, entropy
    )
    return values


def _applied(
    function: type[torch.autograd.Function],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    known: Targets | None,
    chunk_size: int | None,
    transform: Transform,
    option: Any,
) -> Any:
    """A function of rows ``(N, H)`` and their labels, in the dtype of autocast where that is on.

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
    chunk_size = default_chunk_size(hidden.shape[-1], hidden.dtype) if chunk_size is None else chunk_size
    apply: Any = function.apply
    if torch.compiler.is_compiling():
        # The number of rows that count is known at run time only, so the compiled graph breaks here.
        apply = torch.compiler.disable(apply)
    rows = hidden.reshape(-1, hidden.shape[-1])
    options = (labels.to(device), known, chunk_size, transform, option, torch.is_grad_enabled())
    with torch.autocast(device.type, enabled=False):
        return apply(rows, weight, bias, *options)


def default_chunk_size(width: int, dtype: torch.dtype) -> int:
    """Default number of rows per chunk: enough for efficient products, with few logits at once."""
    return min(1024, max(128, 2 * width // dtype.itemsize))


def targets_in(labels: torch.Tensor, vocabulary: int, known: Targets | None) -> torch.Tensor:
    """Positions of the labels that are not -100, ascending; raises if one is out of range."""
    known = facts_of(labels, labels.device) if known is None else known
    low, high = known.lowest, known.highest
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"labels must be {IGNORE_INDEX} or in [0, {vocabulary}), got {low if low < 0 else high}; "
            "the vocabulary is the number of rows of the weight"
        )
    return known.positions


class _LinearCrossEntropySum(torch.autograd.Function):
    """(the loss, the number of targets whose logit is the largest), with gradients computed in the forward.

    A separate computation in the backward would need the logits of every chunk again: stored, which is what
    chunks avoid, or recomputed by one more product. Since the output is a scalar, the forward already knows
    the gradients up to one factor, ``grad_output``.
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
        option: tuple[Terms, torch.Tensor | None],
        grad_enabled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = [needed and grad_enabled for needed in ctx.needs_input_grad[:3]]
        (terms, weights), labels = option, labels.reshape(-1)
        head = Head(weight, bias, transform)
        targets = targets_in(labels, weight.shape[0], known)
        products = products_for(weight, min(chunk_size, len(targets)))
        gain = _gain(products.gain, terms, weights, targets)
        kept = ctx.gradients = HeadGradients(hidden, head, wanted, gain)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for index, logits in blocks_of_logits(hidden, head, targets, chunk_size, products, labels, kept):
            factors = None if weights is None else weights[index, None].to(logits.dtype)
            columns = labels[index, None]
            losses, is_largest = losses_of(logits, columns, transform, terms, factors, any(wanted))
            total += losses.sum(dtype=torch.float64)
            correct += is_largest.sum()
        # The kept gradients lack the factor ``scale`` of the logits, and have been multiplied by ``gain``.
        ctx.factor = transform.scale / gain
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(correct)
        return total.to(wide_dtype(hidden)), correct

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor, _of_correct: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        _refuse_second_derivative()
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy_sum: a second backward through the same loss; the first gave its "
                "gradients away. Compute the loss again, or sum losses and call backward once"
            )
        # They leave ``ctx``, so that each is freed as soon as it has been rounded to its input's dtype.
        gradients, ctx.gradients = ctx.gradients, None
        return (*gradients.scaled(grad_output * ctx.factor, ctx.dtype), *(None,) * 6)


def _refuse_second_derivative() -> None:
    """Raise in a backward that is to be derived itself: the kept gradients would count as constants."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a loss without logits has no derivative of its gradient (create_graph=True): call "
            "prepare_loss(model, impl='logits') before it"
        )


def _gain(
    gain: float, terms: Terms, weights: torch.Tensor | None, targets: torch.Tensor
) -> float | torch.Tensor:
    """Factor of the slopes: ``gain``, divided by the largest size that weights and a z-loss can give them.

    ``Products.gain`` keeps small slopes from vanishing in float16, on the assumption that none exceeds 1.
    """
    if gain == 1 or (weights is None and not terms.z_loss) or not len(targets):
        return gain
    # The z-loss adds up to 2 * z_loss * log(Z); logarithms of the denominator up to 64 are allowed for.
    most = 1 + 128 * terms.z_loss
    if weights is None:
        return gain / most
    return gain / (weights[targets].float().abs().amax().clamp_min(1) * most)


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
        chunk_size: int,
        transform: Transform,
        entropy: bool,
        grad_enabled: bool,
    ) -> torch.Tensor:
        wanted = [needed and grad_enabled for needed in ctx.needs_input_grad[:3]]
        head = Head(weight, bias, transform)
        found = hidden.new_zeros(1 + entropy, *labels.shape, dtype=wide_dtype(hidden))
        values, labels = found.view(1 + entropy, -1), labels.reshape(-1)
        positions = targets_in(labels, weight.shape[0], known)
        products = products_for(weight, min(chunk_size, len(positions)))
        # Kept is the gradient of the hidden states for weights of 1, or what it takes to compute all again.
        ctx.keeps = wanted == [True, False, False] and not entropy
        kept = HeadGradients(hidden, head, [ctx.keeps, False, False], products.gain)
        for index, logits in blocks_of_logits(hidden, head, positions, chunk_size, products, labels, kept):
            columns = labels[index, None]
            if entropy:
                transform.of_(logits)
                values[:, index] = torch.cat(loss_and_entropy(logits, columns)[:2], 1).T.to(values.dtype)
            else:
                losses, _ = losses_of(logits, columns, transform, PLAIN, None, ctx.keeps)
                values[0, index] = losses.squeeze(1).to(values.dtype)
        ctx.wanted, ctx.chunk_size, ctx.transform, ctx.dtype = wanted, chunk_size, transform, hidden.dtype
        ctx.factor = transform.scale / products.gain
        if ctx.keeps:
            ctx.save_for_backward(kept.hidden)
        elif any(wanted):
            ctx.save_for_backward(hidden, weight, bias, labels, positions)
        return found

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _refuse_second_derivative()
        none, grad_output = (None,) * 6, grad_output.flatten(1)
        if ctx.keeps:
            (kept,) = ctx.saved_tensors
            factor = (grad_output[0] * ctx.factor).unsqueeze(1)
            out = torch.empty_like(kept, dtype=ctx.dtype)
            return (torch.mul(kept, factor, out=out), None, None, *none)
        hidden, weight, bias, labels, positions = ctx.saved_tensors
        head = Head(weight, bias, ctx.transform)
        with torch.autocast(hidden.device.type, enabled=False):
            gradients, factor = _weighted(
                hidden, head, labels, positions, ctx.chunk_size, grad_output, ctx.wanted
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
    for index, logits in blocks_of_logits(hidden, head, positions, chunk_size, products, labels, gradients):
        columns, own = labels[index, None], weights[:, index, None].to(logits.dtype)
        if len(weights) == 1:
            losses_of(logits, columns, head.transform, PLAIN, own[0], True)
            continue
        tanh = head.transform.of_(logits, keep=True)
        _, entropies, logs = loss_and_entropy(logits, columns)
        # d loss / d x_j = p_j - [j = t], d entropy / d x_j = -p_j (log p_j + entropy)
        logits.mul_(logs.add_(entropies).mul_(-own[1]).add_(own[0]))
        logits.scatter_add_(1, columns, -own[0])
        if tanh is not None:
            logits.mul_(tanh.square_().neg_().add_(1))
    return gradients, largest * head.transform.scale / gain

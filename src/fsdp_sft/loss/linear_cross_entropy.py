"""Cross entropy of a linear head that holds the logits of one chunk of rows at a time.

The gradients are computed in the forward, while a chunk's logits exist, and kept until the backward. They are
the gradients of the *sum*. The backward multiplies them by ``grad_output`` before it rounds them to the dtype
of the inputs, so that a ``GradScaler`` prevents underflow as it does for ordinary logits.
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
    gradients_of_sum,
    targets_in,
    wide_dtype,
)
from fsdp_sft.loss.counting import Targets
from fsdp_sft.loss.products import products_for
from fsdp_sft.loss.terms import PLAIN, Terms
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
        ValueError: If shapes, dtypes, labels or options do not fit together.
        TypeError: If the weight is a DTensor.
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
    if weights is not None:
        _check_weights(weights, labels)
    return chunked_loss(
        hidden,
        weight,
        labels,
        bias=bias,
        chunk_size=chunk_size,
        softcap=softcap,
        scale=scale,
        known=None,
        weights=weights,
        terms=Terms(label_smoothing=label_smoothing, z_loss=z_loss),
    )


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    known: Targets | None,
    weights: torch.Tensor | None = None,
    terms: Terms = PLAIN,
) -> torch.Tensor:
    """``linear_cross_entropy_sum``, which need not wait for the device if the targets are ``known``."""
    check_operands(hidden, weight, labels, bias)
    chunk_size = default_chunk_size(hidden.shape[-1], hidden.dtype) if chunk_size is None else chunk_size
    scale = 1.0 if scale is None else scale
    check_options(softcap, scale, chunk_size)
    hidden, weight, bias = as_computed(hidden, weight, bias)
    apply: Any = _LinearCrossEntropySum.apply
    if torch.compiler.is_compiling():
        # The number of rows that count is known at run time only, so the compiled graph breaks here.
        apply = torch.compiler.disable(apply)
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).to(hidden.device)
    head = (
        softcap,
        scale,
        terms,
        None if weights is None else weights.detach().reshape(-1).to(hidden.device),
    )
    with torch.autocast(hidden.device.type, enabled=False):
        result: torch.Tensor = apply(
            rows, weight, bias, labels, known, chunk_size, head, torch.is_grad_enabled()
        )
    return result


class _LinearCrossEntropySum(torch.autograd.Function):
    """The loss, with its gradients computed in the forward.

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
        options: tuple[float | None, float, Terms, torch.Tensor | None],
        grad_enabled: bool,
    ) -> torch.Tensor:
        wanted = [needed and grad_enabled for needed in ctx.needs_input_grad[:3]]
        softcap, scale, terms, weights = options
        head = Head(weight, bias, softcap, scale)
        targets = targets_in(labels, weight.shape[0], known)
        products = products_for(weight, min(chunk_size, len(targets)))
        gain = _gain(products.gain, terms, weights, targets)
        ctx.gradients = HeadGradients(hidden, head, wanted, gain)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for index, logits in blocks_of_logits(
            hidden, head, targets, chunk_size, products, labels=labels, gradients=ctx.gradients
        ):
            factors = None if weights is None else weights[index, None].to(logits.dtype)
            losses = losses_of(logits, labels[index, None], head, terms, factors, any(wanted))
            total += losses.sum(dtype=torch.float64)
        # The kept gradients lack the factor ``scale`` of the logits, and have been multiplied by ``gain``.
        ctx.factor = head.scale / gain
        ctx.dtype = hidden.dtype
        return total.to(wide_dtype(hidden))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*gradients_of_sum(ctx, "linear_cross_entropy_sum", grad_output), *(None,) * 5)


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
    return gain / (weights[targets].float().amax().clamp_min(1) * most)


def losses_of(
    logits: torch.Tensor,
    columns: torch.Tensor,
    head: Head,
    terms: Terms,
    weights: torch.Tensor | None,
    slopes: bool,
) -> torch.Tensor:
    """Losses of some rows, ``(C, 1)``; overwrites ``logits`` by their gradient, without the factor ``scale``.

    With x the logits after scale and soft cap, p their softmax, Z its denominator, t the target, V the size
    of the vocabulary, s the label smoothing and z the factor of the z-loss, a row has::

        loss     (1 - s) * -log p_t + s * mean(-log p) + z * log(Z) ** 2
        d/dx_j   p_j * (1 + 2 z log(Z)) - (1 - s) * [j = t] - s / V

    The soft cap multiplies that by its derivative, 1 - tanh ** 2.

    Args:
        logits: Logits ``(C, V)`` before scale and soft cap; overwritten.
        columns: Targets, ``(C, 1)``.
        head: Scale and soft cap.
        terms: Definition of the loss.
        weights: Factors of the rows' losses, ``(C, 1)``, or None.
        slopes: Whether the gradient is wanted.
    """
    tanh = head.transform_(logits, keep=slopes)
    smoothing, z_loss = terms.label_smoothing, terms.z_loss
    largest = logits.amax(-1, keepdim=True)
    behind = largest - logits.gather(1, columns)
    mean = logits.mean(-1, keepdim=True) if smoothing else largest
    torch.softmax(logits, -1, out=logits)
    # ``logits`` holds probabilities now. That of the target may be 0 in float32, but the largest is at least
    # 1 / V. So -log p_t = (x_max - x_t) - log p_max, in which neither term overflows.
    above = logits.amax(-1, keepdim=True).log()  # log p_max = x_max - log(Z)
    losses = behind - above
    if smoothing:  # mean(-log p) exceeds -log p_t by x_t - mean(x)
        losses += smoothing * (largest - behind - mean)
    if z_loss:
        losses += z_loss * (largest - above).square_()
    if weights is not None:
        losses *= weights
    if slopes:
        if z_loss:
            logits.mul_(1 + 2 * z_loss * (largest - above))
        logits.scatter_(1, columns, logits.gather(1, columns) - (1 - smoothing))
        if smoothing:
            logits.sub_(smoothing / logits.shape[1])
        if tanh is not None:
            logits.mul_(tanh.square_().neg_().add_(1))
        if weights is not None:
            logits.mul_(weights)
    return losses


def _check_weights(weights: torch.Tensor, labels: torch.Tensor) -> None:
    """Raise for weights of another shape, and for those of counted labels that are negative or not finite."""
    if not weights.is_floating_point() or weights.shape != labels.shape:
        raise ValueError(
            f"weights must be floating point of the shape of labels {tuple(labels.shape)}, got "
            f"{weights.dtype} {tuple(weights.shape)}"
        )
    counted = weights.detach()[labels.to(weights.device) != IGNORE_INDEX]
    if not bool(((counted >= 0) & counted.isfinite()).all()):
        raise ValueError("weights must be finite and not negative")

"""Cross entropy of a linear head that holds the logits of one chunk of rows at a time.

The gradients are computed in the forward, while a chunk's logits exist, and kept until the backward. They are
the gradients of the *sum*. The backward multiplies them by ``grad_output`` before it rounds them to the dtype
of the inputs, so that a ``GradScaler`` prevents underflow as it does for ordinary logits.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_sft.loss.counting import Targets, facts_of
from fsdp_sft.loss.products import products_for
from fsdp_sft.loss.terms import PLAIN, Terms
from fsdp_sft.targets import IGNORE_INDEX

_BLOCK = 256  # columns of a block in _largest_column; fastest of 64 to 512 for vocabularies of 32k to 152k


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
    _check(hidden, weight, labels, bias)
    chunk_size = default_chunk_size(hidden.shape[-1], hidden.dtype) if chunk_size is None else chunk_size
    scale = 1.0 if scale is None else scale
    _check_options(softcap, scale, chunk_size)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        got = [str(t.dtype) for t in (hidden, weight, bias) if t is not None]
        raise ValueError(f"hidden, weight and bias must have one dtype, got {', '.join(got)}")
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


@dataclass(frozen=True)
class _Head:
    """The head and the definition of the loss; ``weights`` are factors of all rows' losses."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    scale: float
    terms: Terms
    weights: torch.Tensor | None


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
        head = _Head(weight, bias, *options)
        targets = _targets(labels, weight.shape[0], known)
        loss, ctx.gradients, gain = _chunked(hidden, head, labels, targets, chunk_size, wanted)
        # The kept gradients lack the factor ``scale`` of the logits, and have been multiplied by ``gain``.
        ctx.factor = head.scale / gain
        ctx.dtype = hidden.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy_sum: no derivative of its gradient (create_graph=True); use full "
                "logits and F.cross_entropy for that (impl='logits')"
            )
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy_sum: a second backward through the same loss; the first gave its "
                "gradients away. Compute the loss again, or sum losses and call backward once"
            )
        # The gradients leave ctx, so that each is freed as soon as it has been rounded to its input's dtype.
        # Nothing is left for a second backward.
        gradients, ctx.gradients = ctx.gradients, None
        # grad_output holds a GradScaler's scale. It is multiplied in float32, before the gradient is rounded
        # to float16, in which small values would be 0 already.
        factor = grad_output * ctx.factor
        return (*(_narrowed(gradients, i, factor, ctx.dtype) for i in range(3)), None, None, None, None, None)


def _narrowed(
    gradients: list[torch.Tensor | None], index: int, factor: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """``factor`` times one of the kept gradients, in ``dtype``; the float32 one is freed."""
    kept, gradients[index] = gradients[index], None
    if kept is None or kept.dtype == dtype:
        return None if kept is None else kept.mul_(factor)
    return torch.mul(kept, factor, out=torch.empty_like(kept, dtype=dtype))


def _chunked(
    hidden: torch.Tensor,
    head: _Head,
    labels: torch.Tensor,
    targets: torch.Tensor,
    chunk_size: int,
    wanted: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor | None], float | torch.Tensor]:
    """Compute the loss and the wanted gradients chunk by chunk.

    Returns:
        (the loss, [gradients of hidden, weight and bias, None where not wanted], gain). The gradients lack
        the factor ``head.scale`` and are multiplied by ``gain``.
    """
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    d_hidden, d_weight, d_bias = (
        torch.zeros(t.shape, dtype=dtype, device=t.device) if t is not None and want else None
        for t, want in zip((hidden, head.weight, head.bias), wanted, strict=True)
    )
    products = products_for(head.weight, min(chunk_size, len(targets)))
    gain = _gain(products.gain, head, targets)
    for index in targets.split(chunk_size) if len(targets) else ():
        rows = hidden.index_select(0, index)
        logits = products.logits(rows)
        for part, block in products.blocks(logits):
            columns = labels[index[part], None]
            if head.bias is not None:
                block.add_(head.bias)
            # From here on ``block`` holds logits of some of the chunk's rows in float32; after
            # _softmax_slopes it holds their gradient, which ends up in ``logits``.
            if products.rounds:
                _refine(block, rows[part], columns, head)
            weights = None if head.weights is None else head.weights[index[part], None].to(block.dtype)
            total += _softmax_slopes(block, columns, head, weights, any(wanted))
            if products.gain != 1:
                block.mul_(gain)
            if d_bias is not None:
                d_bias.add_(block.sum(0))
        if d_hidden is not None:
            d_hidden.index_copy_(0, index, products.hidden_gradient(logits))
        if d_weight is not None:
            products.add_weight_gradient(logits, rows, d_weight)
    return total.to(dtype), [d_hidden, d_weight, d_bias], gain


def _gain(gain: float, head: _Head, targets: torch.Tensor) -> float | torch.Tensor:
    """Factor of the slopes: ``gain``, divided by the largest size that weights and a z-loss can give them.

    ``Products.gain`` keeps small slopes from vanishing in float16, on the assumption that none exceeds 1.
    """
    if gain == 1 or (head.weights is None and not head.terms.z_loss) or not len(targets):
        return gain
    # The z-loss adds up to 2 * z_loss * log(Z); logarithms of the denominator up to 64 are allowed for.
    most = 1 + 128 * head.terms.z_loss
    if head.weights is None:
        return gain / most
    return gain / (head.weights[targets].float().amax().clamp_min(1) * most)


def _refine(logits: torch.Tensor, hidden: torch.Tensor, columns: torch.Tensor, head: _Head) -> None:
    """Compute the two rounded logits that matter most again, in float32: that of the target and the largest.

    bfloat16 moves a logit by up to 0.4 %. In the sum of exponentials the errors of the many logits average
    out, but not that of the largest, nor that of the target, which is subtracted by itself.
    """
    largest = _largest_column(logits if head.scale > 0 else -logits)
    for column in (columns, largest):
        exact = head.weight[column.squeeze(1)].float().mul_(hidden).sum(-1, keepdim=True)
        if head.bias is not None:
            exact.add_(head.bias[column])
        logits.scatter_(1, column, exact)


def _largest_column(logits: torch.Tensor) -> torch.Tensor:
    """``logits.argmax(-1, keepdim=True)`` by blocks: a CPU computes ``amax`` in 1/20 of the time."""
    whole = logits.shape[1] // _BLOCK * _BLOCK
    found = [logits[:, whole:].argmax(-1, keepdim=True) + whole] if whole < logits.shape[1] else []
    if whole:
        block = logits[:, :whole].unflatten(1, (-1, _BLOCK)).amax(-1).argmax(-1, keepdim=True)
        columns = block * _BLOCK + torch.arange(_BLOCK, device=logits.device)
        best = columns.gather(1, logits.gather(1, columns).argmax(-1, keepdim=True))
        found.insert(0, best)
    columns = torch.cat(found, 1)
    return columns.gather(1, logits.gather(1, columns).argmax(-1, keepdim=True))


def _softmax_slopes(
    logits: torch.Tensor, columns: torch.Tensor, head: _Head, weights: torch.Tensor | None, slopes: bool
) -> torch.Tensor:
    """Sum of the losses of some rows; overwrites ``logits`` by their gradient, without the factor ``scale``.

    With x the logits after scale and soft cap, p their softmax, Z its denominator, t the target, V the size
    of the vocabulary, s the label smoothing and z the factor of the z-loss, a row has::

        loss     (1 - s) * -log p_t + s * mean(-log p) + z * log(Z) ** 2
        d/dx_j   p_j * (1 + 2 z log(Z)) - (1 - s) * [j = t] - s / V

    The soft cap multiplies that by its derivative, 1 - tanh ** 2.

    Args:
        logits: Logits ``(C, V)`` before scale and soft cap; overwritten.
        columns: Targets, ``(C, 1)``.
        head: Scale, soft cap and definition of the loss.
        weights: Factors of the rows' losses, ``(C, 1)``, or None.
        slopes: Whether the gradient is wanted.
    """
    tanh = None
    if head.softcap is not None:
        logits.mul_(head.scale / head.softcap).tanh_()
        tanh = logits.clone() if slopes else None
        logits.mul_(head.softcap)
    elif head.scale != 1:
        logits.mul_(head.scale)
    smoothing, z_loss = head.terms.label_smoothing, head.terms.z_loss
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
    return losses.sum(dtype=torch.float64)


def _targets(labels: torch.Tensor, vocabulary: int, known: Targets | None) -> torch.Tensor:
    """Positions of the labels that are not -100, ascending; raises if one is out of range."""
    if known is None:
        known = facts_of(labels, labels.device) if labels.is_cpu else _asked_of_device(labels)
    low, high = known.lowest, known.highest
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"labels must be {IGNORE_INDEX} or in [0, {vocabulary}), got {low if low < 0 else high}; "
            "the vocabulary is the number of rows of the weight"
        )
    return known.positions


def _asked_of_device(labels: torch.Tensor) -> Targets:
    """Facts about labels on a device; the host waits once."""
    ignored = labels == IGNORE_INDEX
    if not labels.numel():
        return Targets(ignored.nonzero().squeeze(1), 0, 0)
    high = labels.masked_fill(ignored, 0).amax()
    low = labels.masked_fill(ignored, 0).amin()
    count, lowest, highest = torch.stack([labels.numel() - ignored.sum(), low, high]).tolist()
    # The same as nonzero(), which would make the host wait once more, for the count.
    return Targets(ignored.to(torch.uint8).argsort(stable=True)[:count], lowest, highest)


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise for shapes, dtypes or devices that do not fit together."""
    from torch.distributed.tensor import DTensor

    if isinstance(weight, DTensor) or isinstance(bias, DTensor) or isinstance(hidden, DTensor):
        raise TypeError(
            "linear_cross_entropy_sum takes ordinary tensors, got a DTensor: gather the parameter first "
            "(FSDP2 does in a forward; unshard() does by hand)"
        )
    if hidden.ndim < 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be (..., H) and weight (V, H), got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if not hidden.is_floating_point() or not weight.is_floating_point():
        raise ValueError(f"hidden and weight must be floating point, got {hidden.dtype} and {weight.dtype}")
    if labels.dtype != torch.int64 or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must be int64 of shape {tuple(hidden.shape[:-1])}, one for each row of hidden, got "
            f"{labels.dtype} {tuple(labels.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if weight.device != hidden.device or (bias is not None and bias.device != hidden.device):
        raise ValueError(f"hidden is on {hidden.device}, weight on {weight.device}; use one device")


def default_chunk_size(width: int, dtype: torch.dtype) -> int:
    """Default number of rows per chunk: enough for efficient products, with few logits at once."""
    return min(1024, max(128, 2 * width // dtype.itemsize))


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


def _check_options(softcap: float | None, scale: float, chunk_size: int) -> None:
    """Raise for options out of range."""
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a positive number or None, got {softcap!r}")
    if not (math.isfinite(scale) and scale != 0):
        raise ValueError(f"scale must be a finite number other than 0, or None, got {scale!r}")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive number of rows or None, got {chunk_size!r}")

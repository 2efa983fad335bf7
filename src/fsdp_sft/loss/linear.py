"""Losses of a linear head that hold the logits of one chunk of rows at a time, and their definition.

``blocks_of_logits`` is the loop: a loss turns each block of logits into what it is made of and, if a gradient
is wanted, overwrites the block by the slopes of the logits. The gradients of the hidden states, of the weight
and of the bias are then products with these, which ``HeadGradients`` sums up. So the gradients of a sum are
computed in the forward, while a chunk's logits exist, and kept until the backward, which multiplies them by
``grad_output`` before it rounds them to the dtype of the inputs: a ``GradScaler`` prevents underflow as it
does for ordinary logits.

The weight of a single row's loss is known in the backward only. If nothing but the hidden states needs a
gradient, it is a factor of their rows, and the forward keeps their gradient as that of the sum does. The
gradient of the head's weight is a sum over rows, so there the backward computes the logits a second time,
which is one product in four.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from fsdp_sft.loss.counting import Targets, facts_of
from fsdp_sft.loss.products import Products, products_for
from fsdp_sft.targets import IGNORE_INDEX

# Slopes of an entropy are p * (log p + H), at most 10 in size for the largest vocabularies.
_MOST_OF_ENTROPY = 16.0


@dataclass(frozen=True)
class Terms:
    """The loss of one target.

    With ``p`` the softmax of its logits and ``Z`` the sum of their exponentials::

        (1 - label_smoothing) * -log p[target] + label_smoothing * mean(-log p) + z_loss * log(Z) ** 2

    Attributes:
        label_smoothing: Label smoothing in [0, 1), defined as in ``torch.nn.functional.cross_entropy``.
        z_loss: Factor of the z-loss, 0 or more. It keeps log(Z) near 0, and so keeps the logits from
            drifting. PaLM used 1e-4 (https://arxiv.org/abs/2204.02311, section 5).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name, value, below in (
            ("label_smoothing", self.label_smoothing, 1.0),
            ("z_loss", self.z_loss, math.inf),
        ):
            if not 0 <= value < below:
                raise ValueError(f"{name} must be in [0, {below:g}), got {value!r}")


PLAIN = Terms()


def summed_loss(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, terms: Terms
) -> torch.Tensor:
    """The loss summed over targets, from full logits.

    Args:
        logits: Logits ``(N, V)``, float32 or float64.
        targets: Target ids, int64 ``(N,)``; -100 does not count.
        weights: Factors of the targets' losses, ``(N,)``; None is 1.
        terms: What the loss has beside the cross entropy.
    """
    if weights is None and terms == PLAIN:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    losses = F.cross_entropy(
        logits, targets, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=terms.label_smoothing
    )
    counts = targets != IGNORE_INDEX
    if terms.z_loss:
        losses = losses + terms.z_loss * torch.where(counts, logits.logsumexp(-1), 0.0).square()
    if weights is not None:
        losses = losses * torch.where(counts, weights.to(losses), 0.0)
    return losses.sum(dtype=torch.float64).to(logits.dtype)


@torch.no_grad()
def num_correct(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Number of targets whose logit is the largest of their row, from full logits; int64, 0-dim.

    Args:
        logits: Logits ``(N, V)``.
        targets: Target ids, int64 ``(N,)``; -100 does not count.
    """
    own = logits.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    return ((own == logits.amax(-1)) & (targets != IGNORE_INDEX)).sum()


@dataclass(frozen=True)
class Head:
    """A head and what its model makes of its output: ``cap(scale * (hidden @ weight.T + bias))``.

    Attributes:
        weight: ``(V, H)``.
        bias: ``(V,)`` or None.
        softcap: Bound of ``cap(x) = softcap * tanh(x / softcap)``; None for no cap.
        scale: Factor of the logits.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    scale: float

    def transform_(self, logits: torch.Tensor, keep: bool) -> torch.Tensor | None:
        """Scale and cap ``logits`` in place; returns the tanh of a cap if it is to be kept."""
        tanh = None
        if self.softcap is not None:
            logits.mul_(self.scale / self.softcap).tanh_()
            tanh = logits.clone() if keep else None
            logits.mul_(self.softcap)
        elif self.scale != 1:
            logits.mul_(self.scale)
        return tanh


def losses_of(
    logits: torch.Tensor,
    columns: torch.Tensor,
    head: Head,
    terms: Terms,
    weights: torch.Tensor | None,
    slopes: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses of some rows, whether each target has its row's largest logit), both ``(C, 1)``.

    ``logits`` are overwritten by their gradient, without the factor ``scale``.

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
    is_largest = behind == 0
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
    return losses, is_largest


class HeadGradients:
    """Gradients of a head's operands, in float32 (float64 for float64 hidden states).

    They lack the factor ``scale`` of the logits, and are multiplied by ``gain``.

    Args:
        hidden: Hidden states ``(N, H)``.
        head: The head.
        wanted: Whether the gradients of hidden states, weight and bias are wanted.
        gain: Factor of the slopes, which keeps small ones from vanishing in float16.
    """

    def __init__(
        self, hidden: torch.Tensor, head: Head, wanted: list[bool], gain: float | torch.Tensor = 1.0
    ) -> None:
        self.gain = gain
        self.any = any(wanted)
        self.hidden, self.weight, self.bias = (
            torch.zeros(t.shape, dtype=wide_dtype(hidden), device=t.device)
            if t is not None and want
            else None
            for t, want in zip((hidden, head.weight, head.bias), wanted, strict=True)
        )

    def scaled(self, factor: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """``factor`` times each of them, in ``dtype``; they are given away, each freed when it is rounded."""
        kept = [self.hidden, self.weight, self.bias]
        self.hidden = self.weight = self.bias = None
        return [_narrowed(kept, index, factor, dtype) for index in range(3)]


def _narrowed(
    gradients: list[torch.Tensor | None], index: int, factor: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """``factor`` times one of the kept gradients, in ``dtype``; the float32 one is freed."""
    kept, gradients[index] = gradients[index], None
    if kept is None or kept.dtype == dtype:
        return None if kept is None else kept.mul_(factor)
    return torch.mul(kept, factor, out=torch.empty_like(kept, dtype=dtype))


def blocks_of_logits(
    hidden: torch.Tensor,
    head: Head,
    positions: torch.Tensor,
    chunk_size: int,
    products: Products,
    *,
    labels: torch.Tensor | None,
    gradients: HeadGradients | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (indices of some rows, their float32 logits before scale and soft cap, to be overwritten).

    If ``gradients`` are wanted, a block must hold the slopes of its logits when the next one is asked for.

    Args:
        hidden: Hidden states ``(N, H)``.
        head: The head.
        positions: Indices of the rows to go through.
        chunk_size: Number of rows whose logits exist at once.
        products: The products for the head's weight.
        labels: Targets of all rows ``(N,)``, whose logits are computed exactly even if products round; None
            if none matters more than the others.
        gradients: Where gradients are summed; None if none is wanted.
    """
    wanted = gradients is not None and gradients.any
    for index in positions.split(chunk_size) if len(positions) else ():
        rows = hidden.index_select(0, index)
        logits = products.logits(rows)
        for part, block in products.blocks(logits):
            if head.bias is not None:
                block.add_(head.bias)
            if products.rounds:
                _refine(block, rows[part], None if labels is None else labels[index[part], None], head)
            yield index[part], block
            if gradients is None or not wanted:
                continue
            if products.gain != 1:
                block.mul_(gradients.gain)
            if gradients.bias is not None:
                gradients.bias.add_(block.sum(0))
        if gradients is None or not wanted:
            continue
        # The slopes of all blocks of the chunk are in ``logits`` now.
        if gradients.hidden is not None:
            gradients.hidden.index_copy_(0, index, products.hidden_gradient(logits))
        if gradients.weight is not None:
            products.add_weight_gradient(logits, rows, gradients.weight)


def _refine(logits: torch.Tensor, hidden: torch.Tensor, columns: torch.Tensor | None, head: Head) -> None:
    """Compute the rounded logits that matter most again, in float32: those of the targets and the largest.

    bfloat16 moves a logit by up to 0.4 %. In the sum of exponentials the errors of the many logits average
    out, but not that of the largest, nor that of the target, which is subtracted by itself.
    """
    largest = (logits if head.scale > 0 else -logits).argmax(-1, keepdim=True)
    for column in (largest,) if columns is None else (columns, largest):
        exact = head.weight[column.squeeze(1)].float().mul_(hidden).sum(-1, keepdim=True)
        if head.bias is not None:
            exact.add_(head.bias[column])
        logits.scatter_(1, column, exact)


def targets_in(labels: torch.Tensor, vocabulary: int, known: Targets | None) -> torch.Tensor:
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


def default_chunk_size(width: int, dtype: torch.dtype) -> int:
    """Default number of rows per chunk: enough for efficient products, with few logits at once."""
    return min(1024, max(128, 2 * width // dtype.itemsize))


def wide_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of losses and of kept gradients: float64 for float64 hidden states, and float32."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _prepared(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(rows of hidden states ``(N, H)``, weight, bias), in the dtype of autocast where that is on.

    Raises:
        ValueError: If there is not one label for each row.
    """
    if labels.dtype != torch.int64 or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must be int64 of shape {tuple(hidden.shape[:-1])}, one for each row of hidden, got "
            f"{labels.dtype} {tuple(labels.shape)}"
        )
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return hidden.reshape(-1, hidden.shape[-1]), weight, bias


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
        chunk_size=chunk_size,
        softcap=softcap,
        scale=scale,
        known=None,
        weights=weights,
        terms=Terms(label_smoothing=label_smoothing, z_loss=z_loss),
    )[0]


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``linear_cross_entropy_sum``, ``num_correct``); no wait for the device if targets are ``known``."""
    rows, weight, bias = _prepared(hidden, weight, labels, bias)
    chunk_size = default_chunk_size(hidden.shape[-1], rows.dtype) if chunk_size is None else chunk_size
    apply: Any = _LinearCrossEntropySum.apply
    if torch.compiler.is_compiling():
        # The number of rows that count is known at run time only, so the compiled graph breaks here.
        apply = torch.compiler.disable(apply)
    labels = labels.reshape(-1).to(hidden.device)
    weights = None if weights is None else weights.detach().reshape(-1).to(hidden.device)
    options = (softcap, 1.0 if scale is None else scale, terms, weights)
    with torch.autocast(hidden.device.type, enabled=False):
        result: tuple[torch.Tensor, torch.Tensor] = apply(
            rows, weight, bias, labels, known, chunk_size, options, torch.is_grad_enabled()
        )
    return result


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
        options: tuple[float | None, float, Terms, torch.Tensor | None],
        grad_enabled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = [needed and grad_enabled for needed in ctx.needs_input_grad[:3]]
        softcap, scale, terms, weights = options
        head = Head(weight, bias, softcap, scale)
        targets = targets_in(labels, weight.shape[0], known)
        products = products_for(weight, min(chunk_size, len(targets)))
        gain = _gain(products.gain, terms, weights, targets)
        ctx.gradients = HeadGradients(hidden, head, wanted, gain)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for index, logits in blocks_of_logits(
            hidden, head, targets, chunk_size, products, labels=labels, gradients=ctx.gradients
        ):
            factors = None if weights is None else weights[index, None].to(logits.dtype)
            losses, is_largest = losses_of(logits, labels[index, None], head, terms, factors, any(wanted))
            total += losses.sum(dtype=torch.float64)
            correct += is_largest.sum()
        # The kept gradients lack the factor ``scale`` of the logits, and have been multiplied by ``gain``.
        ctx.factor = head.scale / gain
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
        return (*gradients.scaled(grad_output * ctx.factor, ctx.dtype), *(None,) * 5)


def _refuse_second_derivative() -> None:
    """Raise in a backward that is to be derived itself: the kept gradients would count as constants."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a loss without logits has no derivative of its gradient (create_graph=True): use impl='logits'"
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
    rows, weight, bias = _prepared(hidden, weight, labels, bias)
    chunk_size = default_chunk_size(hidden.shape[-1], rows.dtype) if chunk_size is None else chunk_size
    apply: Any = _LinearTokenLosses.apply
    if torch.compiler.is_compiling():
        # The number of rows that count is known at run time only, so the compiled graph breaks here.
        apply = torch.compiler.disable(apply)
    labels, options = labels.to(hidden.device), (softcap, scale, entropy, chunk_size)
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
                losses, _ = losses_of(logits, columns, head, PLAIN, None, ctx.keeps)
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
        _refuse_second_derivative()
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

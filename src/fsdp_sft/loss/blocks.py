"""The logits of a head, one block of rows at a time, and what each block is turned into.

``blocks_of_logits`` is the loop: a loss turns each block of logits into what it is made of and, if a gradient
is wanted, overwrites the block by the slopes of the logits. The gradients of the hidden states, of the weight
and of the bias are then products with these, which ``HeadGradients`` sums up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fsdp_sft.loss.plain import Terms
from fsdp_sft.loss.products import Products


@dataclass(frozen=True)
class Transform:
    """The function that a model applies to its head's output: ``cap(scale * logits)``.

    Attributes:
        scale: Factor of the logits.
        softcap: Bound of ``cap(x) = softcap * tanh(x / softcap)``; None for no cap.
    """

    scale: float = 1.0
    softcap: float | None = None

    def of_(self, logits: torch.Tensor, keep: bool = False) -> torch.Tensor | None:
        """Scale and cap ``logits`` in place; returns the tanh of a cap if it is to be kept."""
        tanh = None
        if self.softcap is not None:
            logits.mul_(self.scale / self.softcap).tanh_()
            tanh = logits.clone() if keep else None
            logits.mul_(self.softcap)
        elif self.scale != 1:
            logits.mul_(self.scale)
        return tanh


AS_IT_IS = Transform()


@dataclass(frozen=True)
class Head:
    """A head, and what its model makes of its output: ``transform(hidden @ weight.T + bias)``.

    Attributes:
        weight: ``(V, H)``.
        bias: ``(V,)`` or None.
        transform: Scale and soft cap.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    transform: Transform


def losses_of(
    logits: torch.Tensor,
    columns: torch.Tensor,
    transform: Transform,
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
        transform: Scale and soft cap.
        terms: Definition of the loss.
        weights: Factors of the rows' losses, ``(C, 1)``, or None.
        slopes: Whether the gradient is wanted.
    """
    tanh = transform.of_(logits, keep=slopes)
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


def loss_and_entropy(
    logits: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses ``(C, 1)``, entropies ``(C, 1)``, logarithms of the probabilities), and ``logits`` as those.

    The entropy of a row with probabilities p is ``-sum(p * log p)``.
    """
    logs = torch.log_softmax(logits, -1)
    torch.exp(logs, out=logits)
    return -logs.gather(1, columns), -(logits * logs).sum(-1, keepdim=True), logs


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
        found: list[torch.Tensor | None] = []
        for name in ("hidden", "weight", "bias"):
            kept: torch.Tensor | None = vars(self).pop(name)
            if kept is not None:
                out = kept if kept.dtype == dtype else torch.empty_like(kept, dtype=dtype)
                kept = torch.mul(kept, factor, out=out)
            found.append(kept)
        return found


def wide_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of losses and of kept gradients: float64 for float64 hidden states, and float32."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def blocks_of_logits(
    hidden: torch.Tensor,
    head: Head,
    positions: torch.Tensor,
    chunk_size: int,
    products: Products,
    labels: torch.Tensor,
    gradients: HeadGradients,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (indices of some rows, their float32 logits before scale and soft cap, to be overwritten).

    If gradients are wanted, a block must hold the slopes of its logits when the next one is asked for.

    Args:
        hidden: Hidden states ``(N, H)``.
        head: The head.
        positions: Indices of the rows to go through.
        chunk_size: Number of rows whose logits exist at once.
        products: The products for the head's weight.
        labels: Targets of all rows ``(N,)``, whose logits are computed exactly even if products round.
        gradients: Where gradients are summed.
    """
    for index in positions.split(chunk_size) if len(positions) else ():
        rows = hidden.index_select(0, index)
        logits = products.logits(rows)
        for part, block in products.blocks(logits):
            if head.bias is not None:
                block.add_(head.bias)
            if products.rounds:
                _refine(block, rows[part], labels[index[part], None], head)
            yield index[part], block
            if gradients.any and products.gain != 1:
                block.mul_(gradients.gain)
            if gradients.bias is not None:
                gradients.bias.add_(block.sum(0))
        # The slopes of all blocks of the chunk are in ``logits`` now.
        if gradients.hidden is not None:
            gradients.hidden.index_copy_(0, index, products.hidden_gradient(logits))
        if gradients.weight is not None:
            products.add_weight_gradient(logits, rows, gradients.weight)


def _refine(logits: torch.Tensor, hidden: torch.Tensor, columns: torch.Tensor, head: Head) -> None:
    """Compute the rounded logits that matter most again, in float32: those of the targets and the largest.

    bfloat16 moves a logit by up to 0.4 %. In the sum of exponentials the errors of the many logits average
    out, but not that of the largest, nor that of the target, which is subtracted by itself.
    """
    largest = (logits if head.transform.scale > 0 else -logits).argmax(-1, keepdim=True)
    for column in (columns, largest):
        exact = head.weight[column.squeeze(1)].float().mul_(hidden).sum(-1, keepdim=True)
        if head.bias is not None:
            exact.add_(head.bias[column])
        logits.scatter_(1, column, exact)

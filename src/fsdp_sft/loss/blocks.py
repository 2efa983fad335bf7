"""The logits of a head, one block of rows at a time, and what each block is turned into.

``losses_by_block`` is the loop: ``losses_of`` turns each block of logits into losses and, if a gradient is
wanted, overwrites the block by the slopes of the logits. The gradients of the hidden states, of the weight
and of the bias are then products with these, which ``HeadGradients`` sums up.

Only some accelerators, CUDA among them, multiply two bfloat16 matrices into a float32 result in torch. Each
class of ``Products`` is a way to get float32 results (float64 for float64) in one case. All have the same
interface: logits, gradient of the hidden states, and accumulation of the weight's gradient. Shapes: hidden
``(C, H)``, weight ``(V, H)``, logits and their gradient ("slopes") ``(C, V)``.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fsdp_sft._process.devices import has_mixed_products
from fsdp_sft.loss.plain import Terms, wide_dtype

CACHED_BYTES = 4 << 20  # float32 bytes of a slice that stays in a CPU's cache


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


class HeadGradients:
    """Gradients of a head's operands, in float32 (float64 for float64 hidden states), summed block by block.

    Args:
        hidden: Hidden states ``(N, H)``.
        head: The head.
        wanted: Whether the gradients of hidden states, weight and bias are wanted.

    Attributes:
        any: Whether any is wanted.
        factor: What they are to be multiplied by: the factor ``scale`` of the logits, which their slopes
            lack, over that which kept small slopes from vanishing in float16.
    """

    def __init__(self, hidden: torch.Tensor, head: Head, wanted: list[bool]) -> None:
        self.any = any(wanted)
        self.factor: float | torch.Tensor = 1.0
        self.hidden, self.weight, self.bias = (
            torch.zeros(t.shape, dtype=wide_dtype(hidden), device=t.device)
            if t is not None and want
            else None
            for t, want in zip((hidden, head.weight, head.bias), wanted, strict=True)
        )

    def scaled(self, grad_output: torch.Tensor | float, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Each of them for ``grad_output``, in ``dtype``; given away, each freed when it is rounded."""
        factor = grad_output * self.factor
        found: list[torch.Tensor | None] = []
        for name in ("hidden", "weight", "bias"):
            kept: torch.Tensor | None = vars(self).pop(name)
            if kept is not None:
                out = kept if kept.dtype == dtype else kept.new_empty(kept.shape, dtype=dtype)
                # The weight's may lie the other way, and is turned a slice at a time, which stays in a cache.
                for part in _slices(kept, 2 * CACHED_BYTES) if name == "weight" else (slice(None),):
                    torch.mul(kept[part], factor, out=out[part])
                kept = out
            found.append(kept)
        return found


def losses_by_block(
    hidden: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    positions: torch.Tensor,
    chunk_size: int,
    gradients: HeadGradients,
    terms: Terms,
    weights: torch.Tensor | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (indices of some rows, their losses, whether each has its largest logit at its target).

    Losses and answers are ``(C, 1)``. After the last block ``gradients`` are those of the sum of all losses.

    Args:
        hidden: Hidden states ``(N, H)``.
        head: The head.
        labels: Targets of all rows ``(N,)``.
        positions: Indices of the rows to go through.
        chunk_size: Number of rows whose logits exist at once.
        gradients: Where gradients are summed.
        terms: Definition of the loss.
        weights: Factors of the rows' losses, ``(N,)``, or None.
    """
    products = products_for(head.weight, min(chunk_size, len(positions)))
    weights = None if weights is None else weights.to(wide_dtype(hidden))
    gain = _gain(products.gain, terms, weights, positions)
    gradients.factor = head.transform.scale / gain
    if gradients.weight is not None and products.rounds:  # zeros so far, which lie as well as (H, V)
        gradients.weight = gradients.weight.view(gradients.weight.shape[::-1]).T
    for index in positions.split(chunk_size) if len(positions) else ():
        rows = hidden.index_select(0, index)
        logits = products.logits(rows)
        for part, block in products.blocks(logits):
            columns = labels[index[part], None]
            if head.bias is not None:
                block.add_(head.bias)
            was_largest = _refine(block, rows[part], columns, head) if products.rounds else None
            losses, is_largest = losses_of(
                block,
                columns,
                head.transform,
                terms,
                weights=None if weights is None else weights[index[part], None],
                slopes=gradients.any,
            )
            yield index[part], losses, is_largest if was_largest is None else was_largest
            if gradients.any and products.gain != 1:
                block.mul_(gain)
            if gradients.bias is not None:
                gradients.bias.add_(block.sum(0))
        # The slopes of all blocks of the chunk are in ``logits`` now.
        if gradients.hidden is not None:
            gradients.hidden.index_copy_(0, index, products.hidden_gradient(logits).to(gradients.hidden))
        if gradients.weight is not None:
            products.add_weight_gradient(logits, rows, gradients.weight)


def _gain(
    gain: float, terms: Terms, weights: torch.Tensor | None, positions: torch.Tensor
) -> float | torch.Tensor:
    """Factor of the slopes: ``gain``, divided by the largest size that weights and a z-loss can give them.

    ``Products.gain`` keeps small slopes from vanishing in float16, on the assumption that the largest are of
    size 1. The weights of a mean, or those that a GradScaler makes, can have any size.
    """
    if gain == 1 or not len(positions):
        return gain
    # The z-loss adds up to 2 * z_loss * log(Z); logarithms of the denominator up to 64 are allowed for.
    largest = 1.0 if weights is None else weights[positions].abs().amax().clamp_min(1e-30)
    return gain / ((1 + 128 * terms.z_loss) * largest)


def _refine(logits: torch.Tensor, hidden: torch.Tensor, columns: torch.Tensor, head: Head) -> torch.Tensor:
    """Compute the rounded logits that matter most again, in float32: those of the targets and the largest.

    bfloat16 moves a logit by up to 0.4 %. In the sum of exponentials the errors of the many logits average
    out, but not that of the largest, nor that of the target, which is subtracted by itself.

    Returns:
        Whether each target had its row's largest logit, all of them rounded, ``(C, 1)``.
    """
    largest = _argmax(logits if head.transform.scale > 0 else -logits)
    is_largest = logits.gather(1, columns) == logits.gather(1, largest)
    for column in (columns, largest):
        exact = head.weight[column.squeeze(1)].float().mul_(hidden).sum(-1, keepdim=True)
        if head.bias is not None:
            exact.add_(head.bias[column])
        logits.scatter_(1, column, exact)
    return is_largest


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """``logits.argmax(-1, keepdim=True)``, which in torch goes through a CPU's memory a number at a time.

    The largest of each piece of a row is found by vectors, then the piece, then the place in it. Rows that
    cannot be cut into equal pieces, long enough to be worth it, are left to torch.
    """
    if logits.shape[1] % 64:
        return logits.argmax(-1, keepdim=True)
    pieces: torch.Tensor = logits.unflatten(1, (-1, math.gcd(logits.shape[1], 512)))
    piece = pieces.amax(-1).argmax(-1, keepdim=True)
    return pieces.take_along_dim(piece[..., None], 1).argmax(-1).add_(piece, alpha=pieces.shape[2])


class Products:
    """The products that the loop over chunks uses; here those of a float32 (or float64) weight.

    Attributes:
        gain: Factor that the caller applies to slopes before the products and divides out of their results.
        rounds: Whether the logits have been rounded to a narrower dtype than float32.
    """

    gain = 1.0
    rounds = False

    def __init__(self, weight: torch.Tensor, rows: int) -> None:
        self.weight = weight
        self.buffer = weight.new_empty(rows, weight.shape[0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden @ weight.T``, which may be in a buffer that the next chunk reuses."""
        return torch.mm(hidden.to(self.weight), self.weight.T, out=self.buffer[: len(hidden)])

    def blocks(self, logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Slices of rows with their float32 logits, which the caller overwrites with slopes."""
        # What fits a CPU's cache; an accelerator takes all at once.
        for rows in _slices(logits, CACHED_BYTES if logits.is_cpu else sys.maxsize):
            yield rows, logits[rows]

    def hidden_gradient(self, slopes: torch.Tensor) -> torch.Tensor:
        """``slopes @ weight`` ``(C, H)``, which the caller widens; ``slopes`` is what ``logits`` returned."""
        return slopes @ self.weight

    def add_weight_gradient(self, slopes: torch.Tensor, hidden: torch.Tensor, total: torch.Tensor) -> None:
        """Add ``slopes.T @ hidden`` to ``total``, ``(V, H)``."""
        total.addmm_(slopes.T, hidden.to(slopes))


class _Rounded(Products):
    """bfloat16 products whose rounded results are widened; gradients are summed over chunks in float32."""

    rounds = True

    def blocks(self, logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        wide: torch.Tensor | None = None
        for rows, narrow in super().blocks(logits):  # of which none is longer than the first
            wide = narrow.float() if wide is None else wide[: len(narrow)].copy_(narrow)
            yield rows, wide
            narrow.copy_(wide)

    def add_weight_gradient(self, slopes: torch.Tensor, hidden: torch.Tensor, total: torch.Tensor) -> None:
        turned = hidden.T.contiguous()  # with either operand turned a CPU's product takes half as long again
        for part in _slices(self.weight, 2 * CACHED_BYTES):
            total.T[:, part].add_((turned @ slopes[:, part]).float())


class _Mixed(Products):
    """Products of half-precision operands with float32 results, as tensor cores compute them."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight, 0)
        # The smallest float16 is 6e-8, and many slopes of a large vocabulary are smaller. They are at most 1
        # in size, so a factor of 2**15 keeps them below the largest float16, 65504.
        self.gain = 2.0**15 if weight.dtype == torch.float16 else 1.0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.mm(hidden, self.weight.T, out_dtype=torch.float32)

    def hidden_gradient(self, slopes: torch.Tensor) -> torch.Tensor:
        return torch.mm(slopes.to(self.weight.dtype), self.weight, out_dtype=torch.float32)

    def add_weight_gradient(self, slopes: torch.Tensor, hidden: torch.Tensor, total: torch.Tensor) -> None:
        for part in _slices(self.weight, 64 * CACHED_BYTES):
            narrow = slopes[:, part].to(self.weight.dtype)
            total[part].add_(torch.mm(narrow.T, hidden, out_dtype=torch.float32))


def products_for(weight: torch.Tensor, rows: int) -> Products:
    """The products for ``weight`` and chunks of at most ``rows`` rows."""
    if weight.dtype in (torch.float32, torch.float64):
        return Products(weight, rows)
    # Which products are fast on a CPU is known, whether it has mixed ones or not.
    if weight.device.type not in ("cpu", "meta") and has_mixed_products(weight.device, weight.dtype):
        return _Mixed(weight)
    # float16's range is too small for slopes. bfloat16 matrices are fast, but on an x86 CPU without AVX-512:
    # oneDNN takes none there, and torch's own loop needs up to a hundred times as long as for float32.
    if weight.dtype == torch.bfloat16 and not (
        weight.is_cpu and torch.backends.cpu.get_cpu_capability() == "AVX2"
    ):
        return _Rounded(weight, rows)
    return Products(weight.float(), rows)


def _slices(table: torch.Tensor, most_bytes: int) -> list[slice]:
    """Slices of a matrix's rows of at most ``most_bytes`` of float32 each."""
    step = max(1, most_bytes // (4 * max(table.shape[1], 1)))
    return [slice(start, start + step) for start in range(0, len(table), step)]

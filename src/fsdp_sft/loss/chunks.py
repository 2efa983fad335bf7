"""The logits of a linear head, a chunk of rows at a time, and the gradients of what they are made of.

A loss without logits is a loop over ``blocks_of_logits``: it turns each block of logits into what its loss is
made of and, if a gradient is wanted, overwrites the block by the slopes of the logits. The gradients of the
hidden states, of the weight and of the bias are then products with these, which ``HeadGradients`` sums up.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_sft.loss.counting import Targets, facts_of
from fsdp_sft.loss.products import Products
from fsdp_sft.targets import IGNORE_INDEX

_BLOCK = 256  # columns of a block in _largest_column; fastest of 64 to 512 for vocabularies of 32k to 152k


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


def wide_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of losses and of kept gradients: float64 for float64 hidden states, and float32."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _refine(logits: torch.Tensor, hidden: torch.Tensor, columns: torch.Tensor | None, head: Head) -> None:
    """Compute the rounded logits that matter most again, in float32: those of the targets and the largest.

    bfloat16 moves a logit by up to 0.4 %. In the sum of exponentials the errors of the many logits average
    out, but not that of the largest, nor that of the target, which is subtracted by itself.
    """
    largest = _largest_column(logits if head.scale > 0 else -logits)
    for column in (largest,) if columns is None else (columns, largest):
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


def gradients_of_sum(ctx: Any, loss: str, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients that the forward of a sum has computed up to one factor: ``ctx.gradients``, ``ctx.factor``.

    They leave ``ctx``, so that each is freed as soon as it has been rounded to its input's dtype; nothing is
    left for a second backward. ``grad_output`` holds a GradScaler's scale. It is multiplied in float32,
    before a gradient is rounded to float16, in which small values would be 0 already.
    """
    refuse_second_derivative(loss)
    if ctx.gradients is None:
        raise RuntimeError(
            f"{loss}: a second backward through the same loss; the first gave its gradients away. Compute "
            "the loss again, or sum losses and call backward once"
        )
    gradients, ctx.gradients = ctx.gradients, None
    found: tuple[torch.Tensor | None, ...] = gradients.scaled(grad_output * ctx.factor, ctx.dtype)
    return found


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


def check_operands(
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


def as_computed(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The operands in the dtype of autocast, where that is on.

    Raises:
        ValueError: If they have different dtypes.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        got = [str(t.dtype) for t in (hidden, weight, bias) if t is not None]
        raise ValueError(f"hidden, weight and bias must have one dtype, got {', '.join(got)}")
    return hidden, weight, bias


def refuse_second_derivative(name: str) -> None:
    """Raise in a backward that is to be derived itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: no derivative of its gradient (create_graph=True); use full logits for that "
            "(impl='logits')"
        )


def check_options(softcap: float | None, scale: float, chunk_size: int) -> None:
    """Raise for options out of range."""
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a positive number or None, got {softcap!r}")
    if not (math.isfinite(scale) and scale != 0):
        raise ValueError(f"scale must be a finite number other than 0, or None, got {scale!r}")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive number of rows or None, got {chunk_size!r}")


def _narrowed(
    gradients: list[torch.Tensor | None], index: int, factor: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """``factor`` times one of the kept gradients, in ``dtype``; the float32 one is freed."""
    kept, gradients[index] = gradients[index], None
    if kept is None or kept.dtype == dtype:
        return None if kept is None else kept.mul_(factor)
    return torch.mul(kept, factor, out=torch.empty_like(kept, dtype=dtype))

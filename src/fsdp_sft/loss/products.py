"""The three matrix products of a linear cross entropy, each with float32 results (float64 for float64).

Torch multiplies float32 by float32 into a given buffer, but two bfloat16 matrices into float32 only on some
accelerators, CUDA among them.
Each class here is one way round that, with one interface: logits, gradient of the hidden states, and
accumulation of the weight's gradient. Shapes: hidden ``(C, H)``, weight ``(V, H)``, logits and their
gradient ("slopes") ``(C, V)``.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from fsdp_sft._devices import has_mixed_products

_SLICE_BYTES = 8 << 20  # of float32, where something is done in slices that stay in a CPU's cache


class Products(Protocol):
    """What the chunk loop asks for.

    Attributes:
        gain: What slopes are to be multiplied by before the products, which are then that much too large.
        rounds: Whether the logits have been rounded to less than the wide dtype.
    """

    gain: float
    rounds: bool

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden @ weight.T``, in a buffer that is used again for the next chunk."""

    def blocks(self, logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of ``logits`` and their wide values, which the caller turns into slopes in place."""

    def hidden_gradient(self, slopes: torch.Tensor) -> torch.Tensor:
        """``slopes @ weight``, ``(C, H)``; ``slopes`` is what ``logits`` returned."""

    def add_weight_gradient(self, slopes: torch.Tensor, hidden: torch.Tensor, total: torch.Tensor) -> None:
        """Add ``slopes.T @ hidden`` to ``total``, ``(V, H)``."""


def products_for(weight: torch.Tensor, rows: int) -> Products:
    """The products with ``weight`` for chunks of at most ``rows`` rows."""
    if weight.dtype in (torch.float32, torch.float64):
        return _Same(weight, rows)
    # A CPU is asked nothing: what is fast there is known, whatever else it can do.
    if weight.device.type not in ("cpu", "meta") and has_mixed_products(weight.device, weight.dtype):
        return _Mixed(weight)
    # On a CPU bfloat16 matrices are fast; float16 ones are not, and their range is too small for slopes.
    return _Rounded(weight, rows) if weight.dtype == torch.bfloat16 else _Upcast(weight, rows)


class _InPlace:
    """Slopes take the place of the logits."""

    gain = 1.0
    rounds = False

    def blocks(self, logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        for rows in _ranges(len(logits), _rows_in_cache(logits)):
            yield rows, logits[rows]


class _Same(_InPlace):
    """float32 or float64 throughout, into buffers that are given."""

    def __init__(self, weight: torch.Tensor, rows: int) -> None:
        self.weight = weight
        self.buffer = weight.new_empty(rows, weight.shape[0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.mm(hidden, self.weight.T, out=self.buffer[: len(hidden)])

    def hidden_gradient(self, slopes: torch.Tensor) -> torch.Tensor:
        return slopes @ self.weight

    def add_weight_gradient(self, slopes: torch.Tensor, hidden: torch.Tensor, total: torch.Tensor) -> None:
        total.addmm_(slopes.T, hidden)


class _Rounded:
    """bfloat16 products, rounded, then widened: the weight's gradient is summed over chunks in float32."""

    gain = 1.0
    rounds = True

    def __init__(self, weight: torch.Tensor, rows: int) -> None:
        self.weight = weight
        self.buffer = weight.new_empty(rows, weight.shape[0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.mm(hidden, self.weight.T, out=self.buffer[: len(hidden)])

    def blocks(self, logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        for rows in _ranges(len(logits), _rows_in_cache(logits)):
            wide = logits[rows].float()
            yield rows, wide
            logits[rows] = wide

    def hidden_gradient(self, slopes: torch.Tensor) -> torch.Tensor:
        return (slopes @ self.weight).float()

    def add_weight_gradient(self, slopes: torch.Tensor, hidden: torch.Tensor, total: torch.Tensor) -> None:
        for part in _slices(self.weight):
            total[part].add_((slopes[:, part].T @ hidden).float())


class _Mixed:
    """Half-precision operands, float32 results: what tensor cores do, if torch is told so."""

    rounds = False

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        # float16 ends at 6e-8, where many slopes of a large vocabulary lie; they are at most 1 in size.
        self.gain = 2.0**15 if weight.dtype == torch.float16 else 1.0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.mm(hidden, self.weight.T, out_dtype=torch.float32)

    def blocks(self, logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        yield slice(0, len(logits)), logits

    def hidden_gradient(self, slopes: torch.Tensor) -> torch.Tensor:
        return torch.mm(slopes.to(self.weight.dtype), self.weight, out_dtype=torch.float32)

    def add_weight_gradient(self, slopes: torch.Tensor, hidden: torch.Tensor, total: torch.Tensor) -> None:
        for part in _slices(self.weight, 32 * _SLICE_BYTES):
            narrow = slopes[:, part].to(self.weight.dtype)
            total[part].add_(torch.mm(narrow.T, hidden, out_dtype=torch.float32))


class _Upcast(_InPlace):
    """float32 products for any other dtype and device; the weight is widened one slice at a time."""

    def __init__(self, weight: torch.Tensor, rows: int) -> None:
        self.weight = weight
        self.buffer = weight.new_empty(rows, weight.shape[0], dtype=torch.float32)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.buffer[: len(hidden)]
        for part in _slices(self.weight):
            out[:, part] = hidden.float() @ self.weight[part].float().T
        return out

    def hidden_gradient(self, slopes: torch.Tensor) -> torch.Tensor:
        total = slopes.new_zeros(len(slopes), self.weight.shape[1])
        for part in _slices(self.weight):
            total.addmm_(slopes[:, part], self.weight[part].float())
        return total

    def add_weight_gradient(self, slopes: torch.Tensor, hidden: torch.Tensor, total: torch.Tensor) -> None:
        for part in _slices(self.weight):
            total[part].addmm_(slopes[:, part].T, hidden.float())


def _rows_in_cache(logits: torch.Tensor) -> int:
    if logits.device.type != "cpu":
        return max(len(logits), 1)
    return max(1, _SLICE_BYTES // (4 * max(logits.shape[1], 1)))


def _slices(weight: torch.Tensor, most_bytes: int = _SLICE_BYTES) -> list[slice]:
    """Slices of the vocabulary of at most ``most_bytes`` of float32 each."""
    return _ranges(weight.shape[0], max(1, most_bytes // (4 * max(weight.shape[1], 1))))


def _ranges(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]

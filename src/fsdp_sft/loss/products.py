"""The three matrix products of a linear cross entropy, each with float32 results (float64 for float64).

Only some accelerators, CUDA among them, multiply two bfloat16 matrices into a float32 result in torch. Each
class here is a way to get float32 results in one case. All have the same interface: logits, gradient of the
hidden states, and accumulation of the weight's gradient. Shapes: hidden ``(C, H)``, weight
``(V, H)``, logits and their gradient ("slopes") ``(C, V)``.
"""

from collections.abc import Iterator

import torch

from fsdp_sft._process.devices import has_mixed_products

_SLICE_BYTES = 8 << 20  # float32 bytes of a slice; small enough to stay in a CPU's cache


class Products:
    """The products that the loop over chunks uses; here those of float32 (or float64) operands.

    Attributes:
        gain: Factor that the caller applies to slopes before the products and divides out of their results.
        rounds: Whether the logits have been rounded to a narrower dtype than float32.
    """

    gain = 1.0
    rounds = False

    def __init__(self, weight: torch.Tensor, rows: int, dtype: torch.dtype | None = None) -> None:
        self.weight = weight
        self.buffer = weight.new_empty(rows, weight.shape[0], dtype=dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden @ weight.T``, which may be in a buffer that the next chunk reuses."""
        return torch.mm(hidden, self.weight.T, out=self.buffer[: len(hidden)])

    def blocks(self, logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Slices of rows with their float32 logits, which the caller overwrites with slopes."""
        for rows in _ranges(len(logits), _rows_in_cache(logits)):
            yield rows, logits[rows]

    def hidden_gradient(self, slopes: torch.Tensor) -> torch.Tensor:
        """``slopes @ weight``, ``(C, H)``; ``slopes`` is what ``logits`` returned."""
        return slopes @ self.weight

    def add_weight_gradient(self, slopes: torch.Tensor, hidden: torch.Tensor, total: torch.Tensor) -> None:
        """Add ``slopes.T @ hidden`` to ``total``, ``(V, H)``."""
        total.addmm_(slopes.T, hidden)


class _Rounded(Products):
    """bfloat16 products whose rounded results are widened; gradients are summed over chunks in float32."""

    rounds = True

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


class _Mixed(Products):
    """Products of half-precision operands with float32 results, as tensor cores compute them."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight, 0)
        # The smallest float16 is 6e-8, and many slopes of a large vocabulary are smaller. They are at most 1
        # in size, so a factor of 2**15 keeps them below the largest float16, 65504.
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


class _Upcast(Products):
    """float32 products for any other dtype and device; the weight is widened one slice at a time."""

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


def products_for(weight: torch.Tensor, rows: int) -> Products:
    """The products for ``weight`` and chunks of at most ``rows`` rows."""
    if weight.dtype in (torch.float32, torch.float64):
        return Products(weight, rows)
    # Which products are fast on a CPU is known, whether it has mixed ones or not.
    if weight.device.type not in ("cpu", "meta") and has_mixed_products(weight.device, weight.dtype):
        return _Mixed(weight)
    # On a CPU bfloat16 matrices are fast; float16 ones are not, and their range is too small for slopes.
    if weight.dtype == torch.bfloat16:
        return _Rounded(weight, rows)
    return _Upcast(weight, rows, torch.float32)


def _rows_in_cache(logits: torch.Tensor) -> int:
    """Rows of logits whose float32 values fit a CPU's cache; on an accelerator all of them."""
    if logits.device.type != "cpu":
        return max(len(logits), 1)
    return max(1, _SLICE_BYTES // (4 * max(logits.shape[1], 1)))


def _slices(weight: torch.Tensor, most_bytes: int = _SLICE_BYTES) -> list[slice]:
    """Slices of the vocabulary of at most ``most_bytes`` of float32 each."""
    return _ranges(weight.shape[0], max(1, most_bytes // (4 * max(weight.shape[1], 1))))


def _ranges(length: int, step: int) -> list[slice]:
    """Slices of at most ``step`` that cover ``length``."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]

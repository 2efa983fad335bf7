"""What devices are given to do: products of a model's shapes whose results are known exactly."""

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_sft._tensors.safetensors import bytes_of
from fsdp_sft.check.layers import of_each_kind
from fsdp_sft.planner.model import build_model, decoder_blocks

_DEFAULT = ((4096, 4096), (14336, 4096), (4096, 14336))  # (outputs, inputs), of a block of 8B parameters
_ROWS = 4096
_ON_CPU = (128, 1024)  # rows, and the most of the other sizes: a processor's rate needs no more
# Entries are -1, 0 and 1, so few of them not 0 that sums stay below 256, which bfloat16 has exactly: sums of
# a mean square of 900 pass it by eight and a half standard deviations.
_EXACT_TERMS = 900.0


@dataclass(frozen=True)
class Product:
    """A product ``a @ b.T`` of integers whose result bfloat16 and float32 hold exactly.

    Attributes:
        a: ``(rows, inputs)``.
        b: ``(outputs, inputs)``.
        weights: ``(outputs,)``, float64 in host memory: the result is compared as ``result @ weights``.
        expected: That, ``(rows,)``, computed on the host without the product: ``a @ (b.T @ weights)``.
    """

    a: torch.Tensor
    b: torch.Tensor
    weights: torch.Tensor
    expected: torch.Tensor

    @property
    def flops(self) -> float:
        """Operations of the product."""
        return 2.0 * self.a.shape[0] * self.a.shape[1] * self.b.shape[0]

    def run(self) -> torch.Tensor:
        """The product, as a linear layer computes it."""
        return torch.nn.functional.linear(self.a, self.b)

    def wrong_rows(self, result: torch.Tensor) -> int:
        """Number of rows of a result that are wrong (Freivalds' algorithm), by the host."""
        found = [rows.to(torch.float64).cpu() @ self.weights for rows in result.split(1024)]
        return int((torch.cat(found) != self.expected).sum())


def said_flops(rate: float) -> str:
    """A rate in words."""
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def checksum(result: torch.Tensor) -> int:
    """A checksum of a tensor's bytes."""
    return zlib.crc32(bytes_of(result.detach().cpu().contiguous()))


def block_shapes(config: Any | None) -> list[tuple[int, int]]:
    """(outputs, inputs) of the matrices of a config's largest block; of a usual 8B model without one."""
    if config is None:
        return list(_DEFAULT)
    matrices = [one for one in _largest_block(config) if one.ndim >= 2]
    return sorted({(int(one.shape[-2]), int(one.shape[-1])) for one in matrices if min(one.shape[-2:]) > 8})


def block_bytes(config: Any | None) -> int:
    """Bytes of the largest block in 16 bits: what one gather brings."""
    if config is None:
        return 2 * (4 * 4096 * 4096 + 3 * 4096 * 14336)
    return 2 * sum(one.numel() for one in _largest_block(config))


def _largest_block(config: Any) -> list[torch.Tensor]:
    """The parameters of the largest block of a config's model, without memory."""
    blocks = decoder_blocks(build_model(of_each_kind(config), torch.float32)).values()
    every = [[parameter.detach() for parameter in block.parameters()] for block in blocks]
    return max(every, key=lambda block: sum(one.numel() for one in block))


def make_product(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Product:
    """A product of one shape, the same on all ranks; no generator of the process is moved."""
    outputs, inputs = shape
    rows = _ROWS
    if device.type == "cpu" or not _is_fast(device):
        rows, most = _ON_CPU
        outputs, inputs = min(outputs, most), min(inputs, most)
    a, b = signs(rows, inputs, seed=1), signs(outputs, inputs, seed=2)
    generator = torch.Generator().manual_seed(3)
    weights = (torch.randint(8, (outputs,), generator=generator) * 2 - 7).double()  # odd, so that none is 0
    parts = zip(b.split(1024), weights.split(1024), strict=True)
    inner = torch.stack([part.double().T @ of for part, of in parts]).sum(0)
    expected = torch.cat([part.double() @ inner for part in a.split(1024)])
    return Product(a.to(device, dtype), b.to(device, dtype), weights, expected)


def _is_fast(device: torch.device) -> bool:
    """Whether a device computes by itself; simulated ones have the kernels of the CPU."""
    return device.type in ("cuda", "xpu", "hpu", "npu", "mtia")


def signs(rows: int, columns: int, *, seed: int) -> torch.Tensor:
    """-1, 0 and 1, independent, of which so many are not 0 that a sum of ``columns`` products stays small."""
    share = min(0.8, math.sqrt(_EXACT_TERMS / columns))
    drawn = torch.randint(
        1 << 15, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.int16
    )
    found = (drawn % 2 * 2 - 1).to(torch.int8)
    found[(drawn >> 1) >= round(share * (1 << 14))] = 0
    return found

"""How frozen weights in 16 bits are packed while they are read: NF4 and FP8, in blocks along the rows.

NF4: the code of the nearest of 16 numbers, which divide a normal distribution into parts of equal weight,
for value / m, where m is the largest magnitude of a block of 64 values; value = table[code] * m. As in QLoRA
(arXiv 2305.14314, section 3 and appendix E), but for blocks that do not go on in the next row, and m in
bfloat16, of which two levels of quantisation would save 0.12 bits a value. FP8: e4m3 of value / s, where s
maps the largest magnitude of a block of 128 values to 448.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fsdp_sft._quantised.values import of_floats, of_nibbles, scale
from fsdp_sft._tensors.packed import RowFormat

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
_LARGEST_E4M3 = 448.0


@dataclass(frozen=True)
class Recipe:
    """A way to pack.

    Attributes:
        form: Function from the number of values in a row, and of those that share a scale, to how it is
            packed.
        pack: Function from values ``(rows, width)``, float32, to the parts of their rows.
    """

    form: Callable[..., RowFormat]
    pack: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]


def _blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    padded = F.pad(values, (0, -values.shape[-1] % size))
    return padded.view(len(values), -1, size)


def _pack_nf4(values: torch.Tensor) -> Mapping[str, torch.Tensor]:
    blocks = _blocks(values, 64)
    largest = blocks.abs().amax(-1).to(torch.bfloat16)
    ratios = blocks / largest.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    table = torch.tensor(NF4, device=values.device)
    codes = torch.bucketize(ratios, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    codes = codes.flatten(-2)[:, : values.shape[-1]]
    return {"scale": largest, "codes": codes[:, ::2] | codes[:, 1::2] << 4}


def _nf4(block: int, parts: Mapping[str, torch.Tensor], rows: range, columns: range) -> torch.Tensor:
    return scale(of_nibbles(parts["codes"], NF4), parts["scale"].to(torch.float32), block)


@functools.cache  # so that formats of rows that are alike compare equal
def _form_nf4(width: int, block: int = 64) -> RowFormat:
    parts = (("scale", torch.bfloat16, -(-width // block)), ("codes", torch.uint8, width // 2))
    return RowFormat("nf4", width, parts, functools.partial(_nf4, block))


def _pack_fp8(values: torch.Tensor) -> Mapping[str, torch.Tensor]:
    blocks = _blocks(values, 128)
    scales = (blocks.abs().amax(-1) / _LARGEST_E4M3).clamp_min(torch.finfo(torch.float32).tiny)
    weight = (blocks / scales[..., None]).flatten(-2)[:, : values.shape[-1]]
    return {"scale": scales, "weight": weight.to(torch.float8_e4m3fn)}


def _fp8(block: int, parts: Mapping[str, torch.Tensor], rows: range, columns: range) -> torch.Tensor:
    return scale(of_floats(parts["weight"]), parts["scale"], block)


@functools.cache
def _form_fp8(width: int, block: int = 128) -> RowFormat:
    parts = (("scale", torch.float32, -(-width // block)), ("weight", torch.float8_e4m3fn, width))
    return RowFormat("fp8", width, parts, functools.partial(_fp8, block))


RECIPES = {
    "nf4": Recipe(_form_nf4, _pack_nf4),
    "fp8": Recipe(_form_fp8, _pack_fp8),
}

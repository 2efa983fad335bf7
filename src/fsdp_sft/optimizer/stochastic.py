"""Random bits that depend on an element's place alone, and float32 rounded by them to bfloat16. No state."""

import math

import torch

from fsdp_sft._boxes import Box

_BITS = 1 << 64
# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_LARGEST = torch.finfo(torch.bfloat16).max
_KEPT = -(1 << 16)  # the bits of a float32 that a bfloat16 has


def key_of(*numbers: int) -> int:
    """One number of 64 bits for several: another one for others, or the same in another order."""
    key = 0
    for number in numbers:
        key = _mixed((key + _GAMMA + number) % _BITS)
    return key


def random_bits(key: int, numbers: torch.Tensor) -> torch.Tensor:
    """64 random bits for each of ``numbers``, the same on every device.

    Args:
        key: From ``key_of``; other bits for another key.
        numbers: int64, overwritten by the result.
    """
    bits = numbers.mul_(_signed(_GAMMA)).add_(_signed(key))
    for shift, factor in _MIX:
        # Shifts of signed numbers drag the sign along, which is no bit of theirs.
        bits ^= (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            bits *= _signed(factor)
    return bits


def sixteen_of(bits: torch.Tensor, lane: int) -> torch.Tensor:
    """16 of the 64 bits of each, those of one of four lanes: int32 in [0, 65536)."""
    half = bits.view(torch.int32).view(-1, 2)[:, lane // 2]
    return (half >> 16 * (lane % 2)).bitwise_and_(0xFFFF)


def numbers_in_whole(
    box: Box, shape: tuple[int, ...], start: int, stop: int, device: torch.device
) -> torch.Tensor:
    """Elements ``start`` to ``stop`` of a part, counted in the order of the whole tensor: int64.

    Args:
        box: The part.
        shape: Of the whole tensor.
        start: First element, counted in the order of the part.
        stop: The one after the last.
        device: Of the result.
    """
    dims = _merged(box, shape)
    left = torch.arange(start, stop, dtype=torch.int64, device=device)
    if len(dims) == 1:
        return left.add_(dims[0][0])
    found, stride = torch.zeros_like(left), 1
    for offset, extent, size in reversed(dims):
        found.add_(left % extent, alpha=stride).add_(offset * stride)
        left.div_(extent, rounding_mode="floor")
        stride *= size
    return found


def round_into(target: torch.Tensor, values: torch.Tensor, noise: torch.Tensor) -> None:
    """Write float32 into bfloat16: up or down by chance, nearer ones more often, so that the mean is right.

    What bfloat16 can hold stays as it is, infinities and NaN too; what is finite stays finite.

    Args:
        target: bfloat16.
        values: float32 of the same shape; overwritten.
        noise: int32 of the same shape, in [0, 65536) and evenly distributed; overwritten.
    """
    bits, is_nan = values.view(torch.int32), values.isnan()
    noise.masked_fill_(values.abs() >= _LARGEST, 0)  # above there is only infinity
    bits.add_(noise).bitwise_and_(_KEPT)  # a carry out of the lower half is the next number from zero
    target.copy_(values.masked_fill_(is_nan, math.nan))


def _merged(box: Box, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(offset, extent, size of the whole) per dimension, each uncut one as one with the dimension before."""
    dims: list[tuple[int, int, int]] = []
    for offset, extent, size in zip(box.offset, box.shape, shape, strict=True):
        if dims and extent == size:
            dims[-1] = (dims[-1][0] * size, dims[-1][1] * size, dims[-1][2] * size)
        else:
            dims.append((offset, extent, size))
    return dims or [(0, 1, 1)]


def _mixed(number: int) -> int:
    for shift, factor in _MIX:
        number = (number ^ (number >> shift)) * factor % _BITS
    return number


def _signed(number: int) -> int:
    return number - _BITS if number >= _BITS // 2 else number

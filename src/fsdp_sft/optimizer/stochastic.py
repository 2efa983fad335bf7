"""Random bits computed from an element's place, without state, and stochastic rounding by them."""

import math

import torch

from fsdp_sft._tensors.boxes import Box

_BITS = 1 << 64
# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_LARGEST = torch.finfo(torch.bfloat16).max
_KEPT = -(1 << 16)  # mask of the upper 16 bits of a float32, which are those of a bfloat16


def key_of(*numbers: int) -> int:
    """A 64-bit number made from several numbers; other numbers, or another order, give another key."""
    key = 0
    for number in numbers:
        key = _mixed((key + _GAMMA + number) % _BITS)
    return key


def random_bits(key: int, numbers: torch.Tensor) -> torch.Tensor:
    """64 random bits for each of ``numbers``, the same on every device.

    Args:
        key: Key from ``key_of``; another key gives other bits.
        numbers: Numbers, int64; overwritten by the result.
    """
    bits = numbers.mul_(_signed(_GAMMA)).add_(_signed(key))
    for shift, factor in _MIX:
        # SplitMix64 shifts unsigned numbers. A shift of int64 fills up with copies of the sign bit, which the
        # mask removes.
        bits ^= (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            bits *= _signed(factor)
    return bits


def sixteen_of(bits: torch.Tensor, lane: int) -> torch.Tensor:
    """One of the four lanes of 16 bits in each of the 64-bit numbers: int32 in [0, 65536)."""
    half = bits.view(torch.int32).view(-1, 2)[:, lane // 2]
    return (half >> 16 * (lane % 2)).bitwise_and_(0xFFFF)


def numbers_in_whole(
    box: Box, shape: tuple[int, ...], start: int, stop: int, device: torch.device
) -> torch.Tensor:
    """Indices in the whole flattened tensor of the elements ``start`` to ``stop`` of a part, int64.

    Args:
        box: Place of the part in the whole tensor.
        shape: Shape of the whole tensor.
        start: Index of the first element in the flattened part.
        stop: Index after the last element.
        device: Device of the result.
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
    """Write float32 values into bfloat16, rounded up or down at random so that the mean is right.

    A value that bfloat16 can hold stays as it is, infinities and NaN included. A finite value stays finite.

    Args:
        target: bfloat16 tensor to write to.
        values: float32 tensor of the same shape; overwritten.
        noise: int32 tensor of the same shape, uniformly distributed in [0, 65536); overwritten.
    """
    bits, is_nan = values.view(torch.int32), values.isnan()
    noise.masked_fill_(values.abs() >= _LARGEST, 0)  # the next number above would be infinity
    # A bfloat16 is the upper half of a float32's bits. Noise of 16 bits carries into it with a probability of
    # (lower half) / 65536, and a carry gives the next bfloat16 away from zero, whatever the exponent.
    bits.add_(noise).bitwise_and_(_KEPT)
    target.copy_(values.masked_fill_(is_nan, math.nan))


def _merged(box: Box, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(offset, extent, size of the whole) of each dimension; uncut ones are merged into the one before."""
    dims: list[tuple[int, int, int]] = []
    for offset, extent, size in zip(box.offset, box.shape, shape, strict=True):
        if dims and extent == size:
            dims[-1] = (dims[-1][0] * size, dims[-1][1] * size, dims[-1][2] * size)
        else:
            dims.append((offset, extent, size))
    return dims or [(0, 1, 1)]


def _mixed(number: int) -> int:
    """The mixing function of SplitMix64, on a Python integer."""
    for shift, factor in _MIX:
        number = (number ^ (number >> shift)) * factor % _BITS
    return number


def _signed(number: int) -> int:
    """The int64 that has the bits of an unsigned 64-bit number."""
    return number - _BITS if number >= _BITS // 2 else number

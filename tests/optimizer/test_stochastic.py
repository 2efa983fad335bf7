"""Stochastic rounding beside exact arithmetic on Python's integers and fractions."""

import math
import struct
from fractions import Fraction

import pytest
import torch

from fsdp_sft._tensors.boxes import Box, box_at, cuts_of, whole
from fsdp_sft.optimizer.adamw import key_of, numbers_in_whole, random_bits, round_into, sixteen_of

LARGEST = struct.unpack(">f", bytes.fromhex("7f7f0000"))[0]


def _rounded(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    target = torch.empty_like(values, dtype=torch.bfloat16)
    round_into(target, values.clone(), noise.to(torch.int32))
    return target


def _neighbours(value: float) -> tuple[float, float]:
    """What bfloat16 has next to a number, towards zero and away from it."""
    number = int.from_bytes(struct.pack(">f", value), "big") & 0xFFFF0000
    both = [struct.unpack(">f", n.to_bytes(4, "big"))[0] for n in (number, number + 0x10000)]
    return both[0], (both[1] if value != both[0] else both[0])


def test_only_the_two_neighbours_and_each_as_often_as_it_is_near() -> None:
    torch.manual_seed(0)
    values = torch.cat(
        [torch.randn(40), torch.randn(20) * 1e-30, torch.randn(20) * 1e30, torch.tensor([1e-41])]
    )
    every = torch.arange(1 << 16)  # each noise that there is, once: the mean is exact
    for value in values.tolist():
        found = _rounded(torch.full((1 << 16,), value), every).double()
        assert set(found.tolist()) <= set(_neighbours(value))
        counts = {float(v): int((found == v).sum()) for v in found.unique()}
        mean = sum((Fraction(v) * n for v, n in counts.items()), Fraction(0)) / (1 << 16)
        assert mean == Fraction(value), value


def test_what_bfloat16_has_stays_as_it_is() -> None:
    torch.manual_seed(0)
    codes = (torch.arange(1 << 16).to(torch.int32) << 16).view(torch.float32)  # all numbers of bfloat16
    for noise in (0, 1, 0xFFFF):
        found = _rounded(codes, torch.full((1 << 16,), noise))
        assert torch.equal(found.isnan(), codes.isnan())
        plain = codes[~codes.isnan()]
        assert torch.equal(found.float()[~codes.isnan()].view(torch.int32), plain.view(torch.int32))


@pytest.mark.parametrize("noise", [0, 1, 0x8000, 0xFFFF])
def test_what_is_not_finite_stays_so_and_what_is_finite_too(noise: int) -> None:
    patterns = [
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x7FFFFFFF,
        0xFFFFFFFF,
        0x7F800001,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F7F0001,
    ]
    values = torch.tensor([p - (1 << 32) if p >> 31 else p for p in patterns], dtype=torch.int32).view(
        torch.float32
    )
    found = _rounded(values, torch.full((len(patterns),), noise)).tolist()
    assert found[:2] == [math.inf, -math.inf]
    assert all(math.isnan(value) for value in found[2:6])
    assert found[6:] == [LARGEST, -LARGEST, LARGEST]


def test_the_bits_are_those_of_the_published_generator() -> None:
    """SplitMix64 on Python's integers."""

    def splitmix(state: int) -> int:
        z = state % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first output for seed 0, as published
    numbers = [0, 1, 2, 77, 2**31, 2**33 + 5, 2**40]
    for key in (0, 1, key_of(3, 4), 2**64 - 1):
        bits = random_bits(key, torch.tensor(numbers))
        expected = [splitmix(key + n * 0x9E3779B97F4A7C15) for n in numbers]
        assert [b % 2**64 for b in bits.tolist()] == expected
        for lane in range(4):
            assert sixteen_of(bits, lane).tolist() == [e >> 16 * lane & 0xFFFF for e in expected]


def test_keys_differ_by_number_and_order() -> None:
    keys = [key_of(a, b, c) for a in range(-2, 9) for b in range(9) for c in range(9)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 1 << 64 for key in keys)


@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 6, 10), (2, 3, 4, 5), ()])
def test_numbers_are_those_of_the_whole_tensor(shape: tuple[int, ...]) -> None:
    from torch.distributed.tensor import Replicate, Shard

    numbers = torch.arange(math.prod(shape)).view(shape)
    cuts = [[Replicate(), Replicate()]] + [[Replicate(), Shard(d)] for d in range(len(shape))]
    cuts += [[Shard(a), Shard(b)] for a in range(len(shape)) for b in range(len(shape))]
    for placements in cuts:
        for coordinate in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)):
            box = box_at(shape, cuts_of(placements, (2, 3), len(shape)), (2, 3), coordinate)
            expected = numbers[box.slices].reshape(-1)
            found = numbers_in_whole(box, shape, 0, box.numel, torch.device("cpu"))
            assert torch.equal(found, expected), (placements, coordinate)
            if box.numel > 2:
                part = numbers_in_whole(box, shape, 1, box.numel - 1, torch.device("cpu"))
                assert torch.equal(part, expected[1:-1])
    assert numbers_in_whole(whole(shape), shape, 0, 1, torch.device("cpu")).tolist() == [0]


def test_numbers_beyond_32_bits() -> None:
    box = Box((1 << 20, 3), (2, 5))
    found = numbers_in_whole(box, (1 << 21, 1 << 14), 4, 6, torch.device("cpu"))
    assert found.tolist() == [(1 << 34) + 7, (1 << 34) + (1 << 14) + 3]

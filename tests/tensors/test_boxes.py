"""Boxes: what torch's own chunks are, and how tensors are put together from them."""

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_sft._tensors.boxes import Box, box_at, cuts_of, part_of, whole


def _at(shape: tuple[int, ...], placements: list[Any], mesh: tuple[int, ...], place: tuple[int, ...]) -> Box:
    return box_at(shape, cuts_of(placements, mesh, len(shape)), mesh, place)


def test_boxes_are_what_torch_has() -> None:
    for rows in (0, 1, 3, 7, 8):
        for parts in (1, 2, 3, 4):
            boxes = [_at((rows, 5), [Replicate(), Shard(0)], (2, parts), (1, i)) for i in range(parts)]
            chunks = list(torch.zeros(rows, 5).chunk(parts)) + [torch.zeros(0, 5)] * parts
            assert [box.shape for box in boxes] == [tuple(c.shape) for c in chunks[:parts]]
            assert (_times_covered((rows, 5), boxes) == 1).all()
    grid = [_at((5, 7), [Shard(0), Shard(1)], (2, 3), (i, j)) for i in range(2) for j in range(3)]
    assert (_times_covered((5, 7), grid) == 1).all()


def _times_covered(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    covered = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        covered[box.slices] += 1
    return covered


def test_the_part_that_two_boxes_share() -> None:
    tensor = torch.arange(60).view(3, 4, 5)
    a, b = Box((0, 1, 0), (2, 3, 4)), Box((1, 0, 2), (2, 2, 3))
    common = a.intersect(b)
    assert common == Box((1, 1, 2), (1, 1, 2)) == b.intersect(a)
    assert torch.equal(tensor[common.slices], part_of(tensor, common))
    inside = part_of(part_of(tensor, a), common.relative_to(a))
    assert torch.equal(inside, tensor[common.slices])
    assert a.intersect(Box((2, 0, 0), (1, 4, 5))) is None
    assert whole(()).intersect(whole(())) == Box((), ())


def test_a_strided_shard_is_cut_after_the_axes_that_follow() -> None:
    """Experts are shared out along the last axis first, and FSDP2 cuts what each rank then has."""
    numbers = torch.arange(13)
    for sharing, parts in ((1, 2), (2, 1), (2, 3), (3, 2), (4, 4)):
        placements = [Replicate(), _StridedShard(0, split_factor=sharing), Shard(0)]
        for i, j in itertools.product(range(parts), range(sharing)):
            box = _at((13, 5), placements, (2, parts, sharing), (1, i, j))
            experts = _chunk(numbers, sharing, j)
            assert numbers[box.slices[:1]].tolist() == _chunk(experts, parts, i).tolist()
            assert box.shape[1] == 5
    other = _at((8, 6), [Shard(1), Shard(0)], (2, 4), (1, 3))
    assert other == Box((6, 3), (2, 3))
    last = _at((8, 6), [_StridedShard(-2, split_factor=4), Shard(-2)], (2, 4), (1, 3))
    assert last == Box((7, 0), (1, 6))


def _chunk(tensor: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    chunks = tensor.chunk(parts)
    return chunks[index] if index < len(chunks) else tensor[:0]


@pytest.mark.parametrize(
    "placements",
    [
        [_StridedShard(0, split_factor=3), Shard(0)],  # neither of the axes that follow nor of none
        [Shard(0), _StridedShard(0, split_factor=2)],  # fused weights, each half cut by itself
        [Partial(), Shard(0)],
    ],
)
def test_what_leaves_a_rank_several_boxes_or_none_is_refused(placements: list[Any]) -> None:
    with pytest.raises(TypeError, match="cannot be read or stored by boxes"):
        _at((8, 4), placements, (2, 2), (0, 1))

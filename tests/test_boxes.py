"""Boxes: what torch's own chunks are, and how tensors are put together from them."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_sft._boxes import Box, box_at, part_of, tiling_problem, whole


def test_boxes_are_what_torch_has() -> None:
    for rows in (0, 1, 3, 7, 8):
        for parts in (1, 2, 3, 4):
            boxes = [box_at((rows, 5), [Replicate(), Shard(0)], (2, parts), (1, i)) for i in range(parts)]
            chunks = list(torch.zeros(rows, 5).chunk(parts)) + [torch.zeros(0, 5)] * parts
            assert [box.shape for box in boxes] == [tuple(c.shape) for c in chunks[:parts]]
            assert tiling_problem((rows, 5), boxes) is None
    grid = [box_at((5, 7), [Shard(0), Shard(1)], (2, 3), (i, j)) for i in range(2) for j in range(3)]
    assert tiling_problem((5, 7), grid) is None
    assert "elements" in str(tiling_problem((5, 7), grid[1:]))
    assert "overlap" in str(tiling_problem((4,), [Box((0,), (2,)), Box((1,), (2,))]))
    assert "outside" in str(tiling_problem((4,), [Box((2,), (4,))]))
    assert "outside" in str(tiling_problem((4,), [Box((0, 0), (2, 2))]))


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


def test_a_shard_that_is_no_single_box_is_refused() -> None:
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    with pytest.raises(TypeError, match="cannot be read or stored by boxes"):
        box_at((8, 4), placements, (2, 2), (0, 1))

"""Shardings and boxes against torch.chunk, rank by rank."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_sft._tensors.boxes import Box, box_at, cuts_of
from fsdp_sft._tensors.sharding import Sharding
from fsdp_sft.dcp_io.manifest import encode_sharding, parse_sharding
from fsdp_sft.dcp_io.parts import StoredTensor


def _drawn(seed: int) -> tuple[Sharding, tuple[int, ...], int]:
    draw = random.Random(seed)
    mesh = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3)))
    shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3)))
    splits = tuple(
        (axis, draw.randrange(len(shape)))
        for axis in draw.sample(range(len(mesh)), draw.randint(0, len(mesh)))
    )
    size = torch.Size(mesh).numel()
    sharding = Sharding(
        mesh, tuple(draw.sample(range(size + 3), size)) if draw.random() < 0.5 else None, splits
    )
    return sharding, shape, draw.randrange(sharding.copies)


def _by_torch(sharding: Sharding, shape: tuple[int, ...], copy: int) -> dict[int, torch.Tensor]:
    """Rank to the elements that it has, by cutting a tensor of numbers; no arithmetic shared."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    others = [axis for axis in range(len(sharding.mesh_shape)) if axis not in dict(sharding.splits)]
    copies = list(itertools.product(*(range(sharding.mesh_shape[axis]) for axis in others)))
    grid = torch.tensor(sharding.ranks or range(torch.Size(sharding.mesh_shape).numel())).reshape(
        sharding.mesh_shape
    )
    found = {}
    for place in itertools.product(*map(range, sharding.mesh_shape)):
        if tuple(place[axis] for axis in others) != copies[copy]:
            continue
        part = numbers
        for axis, dim in sharding.splits:
            chunks = part.chunk(sharding.mesh_shape[axis], dim)
            part = chunks[place[axis]] if place[axis] < len(chunks) else part.narrow(dim, 0, 0)
        if part.numel():
            found[int(grid[place])] = part
    return found


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_parts_are_those_of_torch_chunk(first: int) -> None:
    for seed in range(first, first + 100):
        sharding, shape, copy = _drawn(seed)
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
        expected, parts = _by_torch(sharding, shape, copy), dict(sharding.parts(shape, copy))
        assert parts.keys() == expected.keys()
        for rank, box in parts.items():
            assert torch.equal(numbers[box.slices], expected[rank])
            assert sharding.part_of_rank(shape, copy, rank) == box
        for rank in set(range(40)) - parts.keys():
            assert sharding.part_of_rank(shape, copy, rank) is None
        assert sum(box.numel for box in parts.values()) == numbers.numel()
        world = max(sharding.ranks or [torch.Size(sharding.mesh_shape).numel() - 1]) + 1
        assert parse_sharding(encode_sharding(sharding), world) == sharding
        draw = random.Random(seed)
        low = [draw.randrange(n) for n in shape]
        wanted = Box(tuple(low), tuple(draw.randint(1, n - a) for n, a in zip(shape, low, strict=True)))
        meeting = {rank: box for rank, box in parts.items() if box.intersect(wanted) is not None}
        assert dict(sharding.parts(shape, copy, wanted)) == meeting, "what meets a box is what it takes"


def test_whole_tensors_and_those_of_one_rank() -> None:
    everywhere = Sharding((4,), None, ())
    assert (list(everywhere.parts((), 3)), list(everywhere.parts((0, 4), 1))) == ([(3, Box((), ()))], [])
    stored = StoredTensor((2, 3), torch.int8, "model.x", Sharding((1,), (5,), ()))
    assert list(stored.parts(Box((0, 0), (2, 3)))) == [("shards/00005.safetensors", Box((0, 0), (2, 3)))]
    assert stored.part_of_rank(4) is None


@pytest.mark.parametrize(
    "raw",
    [
        {"mesh": [], "splits": []},
        {"mesh": [0], "splits": []},
        {"mesh": [2], "splits": [[1, 0]]},
        {"mesh": [2, 2], "splits": [[0, 0], [0, 1]]},
        {"mesh": [2], "splits": [[0, -1]]},
        {"mesh": [2], "splits": [[0, 0]], "ranks": [0]},
        {"mesh": [2], "splits": [[0, 0]], "ranks": [0, 4]},
        {"mesh": [True], "splits": []},
        {"mesh": [2] * 9, "splits": []},
        {"mesh": [8], "splits": [[0, 0]]},
    ],
)
def test_what_no_sharding_can_be(raw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not valid"):
        parse_sharding(raw, 4)


# --- boxes -------------------------------------------------------------------------------------------------


def _at(shape: tuple[int, ...], placements: list[Any], mesh: tuple[int, ...], place: tuple[int, ...]) -> Box:
    return box_at(shape, cuts_of(placements, mesh, len(shape)), mesh, place)


def test_a_strided_shard_is_cut_after_the_axes_that_follow() -> None:
    """Experts are shared out along the last axis first, and FSDP2 cuts what each rank then has."""
    numbers = torch.arange(13)
    for sharing, parts in ((1, 2), (2, 1), (2, 3), (3, 2), (4, 4)):
        placements = [Replicate(), _StridedShard(0, split_factor=sharing), Shard(0)]
        for i, j in itertools.product(range(parts), range(sharing)):
            box = _at((13, 5), placements, (2, parts, sharing), (1, i, j))
            rows = _chunk(_chunk(numbers, sharing, j), parts, i)
            assert (numbers[box.slices[:1]].tolist(), box.shape[1]) == (rows.tolist(), 5)
    assert _at((8, 6), [Shard(1), Shard(0)], (2, 4), (1, 3)) == Box((6, 3), (2, 3))
    assert _at((8, 6), [_StridedShard(-2, split_factor=4), Shard(-2)], (2, 4), (1, 3)) == Box((7, 0), (1, 6))


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

"""Shardings and boxes against torch.chunk, rank by rank; training on dimensions that lie evenly on ranks."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp_sft as fs
from fsdp_sft._tensors.boxes import Box, box_at, cuts_of
from fsdp_sft._tensors.sharding import Sharding
from fsdp_sft.dcp_io.manifest import encode_sharding, parse_sharding
from fsdp_sft.dcp_io.parts import StoredTensor
from fsdp_sft.shard import units
from tests.harness.models import full, largest_error, ragged_batches, tiny_model, windows_of_rank
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed


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


# --- the dimension that lies evenly on the ranks: loaded, trained, saved, exported --------------------------

EXPERTS = 3  # uneven over 2 and over 4 ranks


def test_the_first_dimension_unless_another_is_evener() -> None:
    dims = {
        ((4096, 4096), 64): 0,
        ((8, 28672, 4096), 64): 1,
        ((8, 3, 4096), 64): 2,
        ((8, 3, 5), 64): 0,  # no dimension divides
        ((1001, 64), 4): 0,  # uneven by less than 5 %
        ((9, 64), 4): 1,
        ((9, 66), 4): 0,  # the other is uneven, too
        **{(nothing, 4): 0 for nothing in ((), (0, 8), (8, 0))},
    }
    assert {case: units.shard_dim(*case) for case in dims} == dims


def test_what_a_rank_has_memory_for_is_the_largest_chunk() -> None:
    for shape, shards in itertools.product(((8, 6, 4), (9, 64), (5,), (101, 3), (3, 3)), (1, 2, 4, 6, 64)):
        assert units.shard_numel(shape, shards) == max(
            chunk.numel() for chunk in torch.empty(shape).chunk(shards, units.shard_dim(shape, shards))
        )
    assert units.shard_numel((), 4) == 1


def _model() -> Any:
    model = tiny_model("mixtral", num_local_experts=EXPERTS, num_hidden_layers=3)
    fs.apply_sac(model, "1/3")
    return fs.shard_model(model, mesh=mesh_here())


def _run(folder: str, evenly: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The default path: ragged batches, evaluate, save, load, go on, export."""
    fs.init_distributed()
    if not evenly:  # the oracle: FSDP2 as it is
        units.shard_dim = lambda shape, shards: 0  # type: ignore[assignment]
    model = _model()
    assert {p.placements[-1].dim for p in model.parameters() if isinstance(p, DTensor)} == (
        {0, 1} if evenly else {0}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step, window in enumerate(windows_of_rank(2, device_here())):
        result = fs.train_step(model, window, optimizer, max_grad_norm=None)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step == 1:
            losses.append(fs.evaluate(model, window).loss)
            fs.save_checkpoint(folder, 2, model=model, optimizer=optimizer)
            after = fs.train_step(model, window, optimizer, max_grad_norm=None).loss
            fs.load_checkpoint(folder, model=model, optimizer=optimizer)
            assert fs.train_step(model, window, optimizer, max_grad_norm=None).loss == after
    fs.export_hf(model, f"{folder}-export", dtype=torch.float32)
    return losses, norms, {name: full(p) for name, p in model.state_dict().items()}


def test_training_is_that_with_first_dimensions(tmp_path: Path) -> None:
    losses, norms, ours = run_distributed(_run, 2, str(tmp_path / "run"), True, timeout=240)[0]
    first = run_distributed(_run, 2, str(tmp_path / "first"), False, timeout=240)[0]
    assert (losses, norms) == (first[0], pytest.approx(first[1], rel=1e-5))  # norms are of other sums
    exported = tf.MixtralForCausalLM.from_pretrained(tmp_path / "run-export", dtype=torch.float32)
    for name, weight in exported.state_dict().items():
        assert torch.equal(ours[name], first[2][name]), name
        assert torch.equal(weight, ours[name]), name


@on_ranks(2)
def test_a_mesh_whose_ranks_do_not_ascend_is_refused(tmp_path: Path) -> None:
    """FSDP2 cuts by the rank in the group, DTensor says the coordinate in the mesh."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh(mesh_here().device_type, [1, 0])
    with pytest.raises(ValueError, match="do not ascend along axis 0"):
        fs.shard_model(tiny_model("llama"), mesh=mesh)
    model = tiny_model("llama")  # of a caller's own
    fully_shard(model, mesh=mesh)
    for action in (
        lambda: fs.save_checkpoint(tmp_path, 1, model=model),
        lambda: fs.save_full_state_dict(model, f"{tmp_path}/full.safetensors"),
        lambda: fs.export_hf(model, f"{tmp_path}/export"),
    ):
        with pytest.raises(ValueError, match="do not ascend"):
            action()


@on_ranks(4)
def test_a_smaller_mesh_after_forward_keeps_first_dimensions() -> None:
    """What stays on fewer ranks after a forward is a run of bytes: first dimensions only, and right."""
    gradients = []
    for reshard in (True, 2):
        model = tiny_model("mixtral", num_local_experts=EXPERTS)
        fs.shard_model(model, mesh=mesh_here(), reshard_after_forward=reshard)
        blocks = {p.placements[-1] for n, p in model.named_parameters() if ".layers." in n}
        assert blocks == ({Shard(0), Shard(1)} if reshard is True else {Shard(0)})
        batch = {name: value.to(device_here()) for name, value in ragged_batches(2)[0].items()}
        fs.loss_sum(model, batch)[0].backward()
        gradients.append({name: full(p.grad) for name, p in model.named_parameters()})
    assert largest_error(*gradients) < 1e-6

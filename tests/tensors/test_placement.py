"""Parameters cut along the dimension that lies evenly on the ranks: loaded, trained, saved, exported."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch.distributed.tensor import DTensor, Shard

import fsdp_sft as fs
from fsdp_sft.shard import units
from tests.harness.models import full, largest_error, ragged_batches, tiny_model, windows_of_rank
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed

EXPERTS = 3  # uneven over 2 and over 4 ranks


def test_the_first_dimension_unless_another_is_evener() -> None:
    dims = {
        ((4096, 4096), 64): 0,
        ((8, 28672, 4096), 64): 1,
        ((8, 3, 4096), 64): 2,
        ((8, 3, 5), 64): 0,  # no dimension divides
        ((1001, 64), 4): 0,  # uneven by less than 5 %
        ((9, 64), 4): 1,
        **{(nothing, 4): 0 for nothing in ((), (0, 8), (8, 0))},
    }
    assert {case: units.shard_dim(*case) for case in dims} == dims


def test_what_a_rank_has_memory_for_is_the_largest_chunk() -> None:
    for shape, shards in itertools.product(((8, 6, 4), (9, 64), (5,), (101, 3), (3, 3)), (1, 2, 4, 6, 64)):
        chunks = torch.empty(shape).chunk(shards, units.shard_dim(shape, shards))
        assert units.shard_numel(shape, shards) == max(chunk.numel() for chunk in chunks)
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

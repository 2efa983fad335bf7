"""One set of ranks a job, one mesh a model: where the mesh of a call comes from, and what is refused."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp_sft as fs
from tests.harness.models import FLOAT32, full, oracle_gradients, ragged_batches, tiny_model
from tests.harness.ranks import device_here, device_type, mesh_here, on_ranks

_ROWS = 23


def _calls_without_a_model(**given: Any) -> list[Callable[[], Any]]:
    batch = ragged_batches(1)[0]
    return [
        lambda: fs.ResumableSampler(_ROWS, **given).num_replicas,
        lambda: fs.PackedSampler([3] * _ROWS, max_length=8, **given).rank,
        lambda: fs.PackedStream([], max_length=8, **given).num_replicas,
        lambda: fs.ResumableSampler(fs.Mixture([_ROWS, _ROWS]), **given).rank,
        lambda: len(list(fs.windows([batch, batch], 1, **given))),
        lambda: fs.count_targets([batch], **given),
        lambda: float(fs.scale_for_backward(torch.tensor(6.0), num_targets=2, **given)),
    ]


def _without_a_model(**given: Any) -> list[Any]:
    """What each call that gets no model makes of its mesh."""
    return [call() for call in _calls_without_a_model(**given)]


@on_ranks(4)
def test_without_a_model_the_only_mesh_is_taken_and_of_two_none() -> None:
    rank = dist.get_rank()
    early = fs.ResumableSampler(_ROWS)  # made before any mesh
    mesh = mesh_here(cp=2)
    expected = _without_a_model(mesh=mesh)
    assert expected[:4] == [2, rank // 2, 2, rank // 2]
    assert _without_a_model() == expected
    assert (early.num_replicas, early.rank) == (2, rank // 2)
    mesh_here(cp=2, dp_replicate=2, dp_shard=1)  # shares rows alike, which leaves nothing to ask
    assert _without_a_model() == expected
    started_anew = pickle.loads(pickle.dumps(fs.ResumableSampler(_ROWS)))
    other = mesh_here()
    for call in _calls_without_a_model():
        with pytest.raises(ValueError, match=r"has made .*cp=2.* and .*dp_shard=4.* by mesh="):
            call()
    with pytest.raises(ValueError, match="by mesh="):
        _ = early.num_replicas
    assert (started_anew.num_replicas, started_anew.rank) == (2, rank // 2)
    assert _without_a_model(mesh=mesh) == expected
    assert _without_a_model(mesh=other)[:4] == [4, rank, 4, rank]


@on_ranks(4)
def test_each_model_knows_its_mesh() -> None:
    """A teacher and a student on meshes of their own, over the same ranks."""
    rank = dist.get_rank()
    meshes = {"student": mesh_here(), "teacher": mesh_here(dp_replicate=2)}
    models = {
        name: fs.shard_model(tiny_model("llama"), mesh=mesh, mp_policy=FLOAT32)
        for name, mesh in meshes.items()
    }
    batches = ragged_batches(8)
    loss, expected = oracle_gradients(tiny_model("llama"), batches)
    targets = fs.count_targets(batches[rank::4], mesh=meshes["student"])
    for model in models.values():
        for batch in batches[rank::4]:
            fs.causal_lm_loss(model, batch, num_targets=targets).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(full(parameter.grad), expected[name], rtol=1e-5, atol=1e-7)
        assert fs.evaluate(model, batches[rank::4]).loss == pytest.approx(loss, rel=1e-6)


@on_ranks(4)
def test_a_mesh_of_some_ranks_is_refused() -> None:
    part = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("job", "dp_shard"))["dp_shard"]
    for call in _calls_without_a_model(mesh=part):
        with pytest.raises(ValueError, match="leaves out some of the 4 ranks"):
            call()
    model = fs.shard_model(tiny_model("llama"), mesh=part, mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {name: value.to(device_here()) for name, value in ragged_batches(1)[0].items()}
    for call in (
        lambda: fs.train_step(model, [batch], optimizer),
        lambda: fs.evaluate(model, [batch]),
        lambda: fs.causal_lm_loss(model, batch, num_targets=3),
        lambda: fs.loss_sum(model, batch),
        lambda: fs.prepare_loss(model),
        lambda: fs.verify_packing(model, max_length=64),
    ):
        with pytest.raises(fs.UnsupportedModelError, match="leaves out some of the 4 ranks"):
            call()

"""Models that others have wrapped: the ranks are inferred, or the wrapper is refused by name."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdp_sft as fs
from tests.harness.device import device_here, mesh_here
from tests.harness.losses import with_loss
from tests.harness.models import full, largest_error, oracle_gradients, ragged_batches, tiny_model
from tests.harness.ranks import on_ranks


class _FabricModule(nn.Module):
    """As Lightning Fabric's: a module around the strategy's, around the user's."""

    def __init__(self, forward_module: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module(*args, **kwargs)


def _accelerated(model: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", LOCAL_RANK=str(dist.get_rank()))
    return accelerate.Accelerator(cpu=True, mixed_precision="no").prepare_model(model)


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "ddp, unused": lambda m: DistributedDataParallel(m, find_unused_parameters=True),
    "ddp, static": lambda m: DistributedDataParallel(m, static_graph=True),
    "fabric": lambda m: _FabricModule(DistributedDataParallel(m), m),
    "compiled": lambda m: torch.compile(DistributedDataParallel(m), backend="eager"),
    "accelerate": _accelerated,
}


@pytest.mark.parametrize(
    "kinds",
    [
        ["ddp", "ddp, unused", "ddp, static", "fabric"],
        # Dynamo compiles DDP's hooks; accelerate takes seconds to import in each rank.
        pytest.param(["compiled", "accelerate"], marks=pytest.mark.slow),
    ],
    ids=["torch", "others"],
)
@on_ranks(2, timeout=240)
def test_wrapped_models_train_as_their_ranks_together(kinds: list[str], tmp_path: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = ragged_batches(2 * ranks)  # unequal targets, and none in the last
    for kind, wrap in [(kind, WRAPPERS[kind]) for kind in kinds]:
        plain = tiny_model("llama")
        loss, expected = oracle_gradients(plain, batches)
        norm = float(torch.stack([g.double().norm() for g in expected.values()]).norm())
        inner = copy.deepcopy(plain).to(device_here())
        model = wrap(inner)
        assert fs.evaluate(model, batches[rank::ranks]).loss == pytest.approx(loss, rel=1e-6), kind
        for grad_sync in ("each", "last") if kind == "ddp" else ("last",):
            inner.load_state_dict(plain.state_dict())
            before = {name: p.detach().clone() for name, p in inner.named_parameters()}
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            result = fs.train_step(
                model, batches[rank::ranks], optimizer, max_grad_norm=None, grad_sync=grad_sync
            )
            assert result.loss == pytest.approx(loss, rel=1e-6), kind
            assert result.grad_norm == pytest.approx(norm, rel=1e-5), kind
            actual = {name: full(before[name] - p.detach()) for name, p in inner.named_parameters()}
            assert largest_error(actual, expected) <= 1e-5, (kind, grad_sync)
        if kind not in ("ddp", "fabric"):
            continue
        fs.save_checkpoint(f"{tmp_path}/{kind}", 1, model=model, optimizer=optimizer)
        other = tiny_model("llama", seed=5)
        fs.load_checkpoint(f"{tmp_path}/{kind}", model=other)
        for name, parameter in other.named_parameters():
            assert torch.equal(parameter, full(inner.get_parameter(name))), (kind, name)
        fs.load_checkpoint(f"{tmp_path}/{kind}", model=wrap(tiny_model("llama", seed=6).to(device_here())))
        assert (fs.export_hf(model, f"{tmp_path}/{kind}-hf") / "config.json").is_file()


@on_ranks(4)
def test_a_process_group_of_some_ranks_is_refused() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(
        tiny_model("llama").to(device_here()), process_group=groups[dist.get_rank() // 2]
    )
    batch = {key: value.to(device_here()) for key, value in ragged_batches(1)[0].items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: dict[str, Callable[[], Any]] = {
        "train_step": lambda: fs.train_step(model, [batch], optimizer),
        "evaluate": lambda: fs.evaluate(model, [batch]),
        "causal_lm_loss": lambda: fs.causal_lm_loss(model, batch, num_targets=3),
        "prepare_loss": lambda: fs.prepare_loss(model),
        "verify_packing": lambda: fs.verify_packing(model, max_length=64),
    }
    for name, call in calls.items():
        with pytest.raises(fs.UnsupportedModelError, match="leaves out some of the 4 ranks"):
            call()
            pytest.fail(name)


def _calls(model: nn.Module) -> list[Any]:
    batch, optimizer = ragged_batches(1)[0], torch.optim.SGD(model.parameters(), lr=0.1)
    return [
        lambda: fs.train_step(model, [batch], optimizer),
        lambda: fs.evaluate(model, [batch]),
        lambda: fs.causal_lm_loss(with_loss(model, impl="logits"), batch, num_targets=3),
        lambda: fs.prepare_loss(model),
        lambda: fs.verify_packing(model, max_length=64),
        lambda: fs.save_checkpoint("nowhere", 1, model=model),
        lambda: fs.load_checkpoint("nowhere", model=model),
        lambda: fs.save_full_state_dict(model, "nowhere.safetensors"),
        lambda: fs.shard_model(model, mesh=mesh_here()),
    ]


@on_ranks(2)
def test_what_cannot_be_followed_is_refused_by_name() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    class DeepSpeedEngine(_FabricModule):
        pass

    part = tiny_model("llama")
    part.model.layers[0] = DistributedDataParallel(part.model.layers[0])
    inner = tiny_model("llama")
    cases = {
        "FullyShardedDataParallel": FullyShardedDataParallel(
            tiny_model("llama"), device_id=torch.device("cpu")
        ),
        "DataParallel": nn.DataParallel(tiny_model("llama")),
        "DeepSpeedEngine": DeepSpeedEngine(inner, inner),
        "only a part": part,
    }
    for named, model in cases.items():
        for number, call in enumerate(_calls(model)):
            with pytest.raises(fs.UnsupportedModelError, match=named):
                call()
                raise AssertionError(f"call {number} of {named}")
    both = DistributedDataParallel(tiny_model("llama"))
    with pytest.raises(fs.UnsupportedModelError, match="already"):
        fs.shard_model(both, mesh=mesh_here())

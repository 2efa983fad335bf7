"""Modules with dtypes of their own, beside a plain model whose modules are cast by hand."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.device import device_here, mesh_here
from tests.harness.models import full, ragged_batches, tiny_model
from tests.harness.ranks import run_distributed

FLOAT32 = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _plain(parts: list[str]) -> Any:
    """A model in bfloat16 of which some modules compute in float32."""
    model: Any = tiny_model("llama").to(device_here())
    for name, parameter in model.named_parameters():
        if not any(name.startswith(f"{part}.") for part in parts):
            parameter.data = parameter.data.bfloat16()
    for name in parts:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda module, args: tuple(arg.float() for arg in args))
        module.register_forward_hook(lambda module, args, output: output.bfloat16())
    return model


def _step(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in ragged_batches(1)[0].items()}
    loss = fs.causal_lm_loss(model, batch, num_targets=1)
    loss.backward()
    shares = dist.get_world_size() if isinstance(model, FSDPModule) else 1
    return loss.item() / shares, {
        name: full(p.grad).float().cpu() / shares for name, p in model.named_parameters()
    }


def _check() -> None:
    parts = [f"model.layers.{layer}.mlp" for layer in range(3)]
    expected = _step(_plain(parts))
    other = _step(_plain([]))
    model: Any = tiny_model("llama")
    fs.shard_model(model, mesh=mesh_here(), mp_policy=BFLOAT16, policies={"*.mlp": FLOAT32})
    assert all(isinstance(model.get_submodule(name), FSDPModule) for name in parts)
    found = _step(model)
    assert found[0] == expected[0] != other[0]
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name
    # The last that fits counts; a block as a whole, and one within it.
    model = tiny_model("llama")
    policies = {"*.mlp": FLOAT32, "model.layers.[12].mlp": BFLOAT16, "model.layers.1": BFLOAT16}
    fs.shard_model(model, mesh=mesh_here(), mp_policy=BFLOAT16, policies=policies)
    assert _step(model)[0] == _step(_plain(parts[:1]))[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_they_compute_in_their_own_dtypes(ranks: int) -> None:
    run_distributed(_check, ranks)


def _check_adapters() -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    model: Any = fs.add_adapters(tiny_model("llama"), lora)
    policies = {"model.layers.*.mlp.up_proj": FLOAT32}
    fs.shard_model(model, mesh=mesh_here(), mp_policy=BFLOAT16, policies=policies, frozen_dtype="nf4")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    assert fs.train_step(model, ragged_batches(1), optimizer).loss > 0
    seen: list[torch.dtype] = []
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    layer.base_layer.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    fs.evaluate(model, ragged_batches(1))
    assert set(seen) == {torch.float32}


def test_names_are_those_of_the_base_within_adapters() -> None:
    pytest.importorskip("peft", reason="adapters need the 'peft' extra")
    run_distributed(_check_adapters, 2)


def _refused() -> None:
    for policies, error, text in (
        ({"*.mpl": FLOAT32}, ValueError, "fits no module"),
        ({"": FLOAT32}, ValueError, "is the model itself"),
        ({"*": FLOAT32}, ValueError, "is the model itself"),
        ({"model.layers": FLOAT32}, fs.UnsupportedModelError, "never called"),
        ({"*.act_fn": FLOAT32}, fs.UnsupportedModelError, "has no parameters"),
        ({"lm_head": FLOAT32}, fs.UnsupportedModelError, r"tied to model.embed_tokens.weight"),
        ({"*.mlp": torch.float32}, TypeError, "must be a torch.distributed.fsdp.MixedPrecisionPolicy"),
        ([FLOAT32], TypeError, "must map names"),
    ):
        model = tiny_model("qwen2-tied")
        given: Any = policies
        with pytest.raises(error, match=text):
            fs.shard_model(model, mesh=mesh_here(), policies=given)
        assert not any(isinstance(module, FSDPModule) for module in model.modules())


def test_what_cannot_have_one() -> None:
    run_distributed(_refused, 1)

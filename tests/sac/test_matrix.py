"""Gradients with checkpointing are those without, bit by bit: families, ratios, ranks, orders, compile."""

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.architectures import inputs_for, tiny_architecture
from tests.harness.device import mesh_here
from tests.harness.losses import gradients_of
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import run_distributed

RATIOS = (0, "1/4", "1/3", "1/2", "2/3", 1)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.2},
    "qwen3": {"attention_dropout": 0.2},
    "gemma3": {"attention_dropout": 0.2},
    "mixtral": {"attention_dropout": 0.2, "router_jitter_noise": 0.2},
    "gpt2": {"resid_pdrop": 0.2, "attn_pdrop": 0.2, "embd_pdrop": 0.2},
    "t5": {"dropout_rate": 0.2},
}
# Submodules that are kept where the rest of their blocks is recomputed.
KEPT: dict[str, Any] = {
    "llama": "self_attn",
    "gpt2": ["c_proj", "sdpa"],
    "mixtral": ["self_attn", "mlp"],
}
HYBRIDS = ("BambaForCausalLM", "JambaForCausalLM", "Zamba2ForCausalLM", "FalconH1ForCausalLM")


def _gradients(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model(**inputs).loss.backward()
    gradients = gradients_of(model)
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    return gradients


def _one(family: str, way: dict[str, Any], order: str, backend: str | None) -> dict[str, torch.Tensor]:
    """Gradients of one fresh model prepared in one order: of a letter each, sac, compile and shard."""
    torch.compiler.reset()
    model = tiny_model(family, **FAMILIES[family])
    for step in order:
        if step == "s":
            fs.apply_sac(model, **way)
        elif step == "f":
            fs.shard_model(model, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy())
        elif backend is not None:
            fs.compile_blocks(model, backend=backend)
    return _gradients(model, {**ragged_batches(2)[0], "use_cache": False})


def _check_matrix(
    families: list[str], ratios: tuple[Any, ...], orders: list[str], backend: str | None
) -> None:
    for family, order in itertools.product(families, orders):
        plain = _one(family, {}, order.replace("s", ""), backend)
        ways = [{"ratio": ratio} for ratio in ratios]
        if family in KEPT and backend is None:
            ways.append({"save": KEPT[family]})
        for way in ways:
            gradients = _one(family, way, order, backend)
            assert gradients.keys() == plain.keys()
            different = [name for name in plain if not torch.equal(gradients[name], plain[name])]
            assert not different, (family, way, order, backend)


def test_eager_gradients_are_bit_equal_on_one_process_without_sharding() -> None:
    _check_matrix(list(FAMILIES), RATIOS, ["s"], None)


@pytest.mark.parametrize("world_size", [1, 2])
def test_eager_gradients_are_bit_equal_when_sharded_in_both_orders(world_size: int) -> None:
    run_distributed(_check_matrix, world_size, list(FAMILIES), RATIOS, ["sf", "fs"], None)


# Each model is compiled anew in each order, which takes three seconds a model.
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_compiled_gradients_are_bit_equal(family: str) -> None:
    run_distributed(_check_matrix, 2, [family], ("1/2",), ["scf", "cfs"], "aot_eager")


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_models_are_bit_equal_too(name: str) -> None:
    model = tiny_architecture(name).train()
    inputs = inputs_for(model)
    expected = _gradients(model, inputs)
    for ratio in ("1/2", 1):
        assert fs.apply_sac(model, ratio)
        gradients = _gradients(model, inputs)
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[key], expected[key]) for key in expected), ratio

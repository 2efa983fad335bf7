"""Gradients with checkpointing are those without, bit by bit: families, ratios, ranks, orders, compile."""

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.models import full, ragged_batches, tiny_model
from tests.harness.ranks import run_distributed

RATIOS = (0, "1/4", "1/3", "1/2", "2/3", 1)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.2},
    "qwen3": {"attention_dropout": 0.2},
    "gemma3": {"attention_dropout": 0.2},
    "mixtral": {"attention_dropout": 0.2, "router_jitter_noise": 0.2},
    "gpt2": {"resid_pdrop": 0.2, "attn_pdrop": 0.2, "embd_pdrop": 0.2},
    "t5": {"dropout_rate": 0.2},
    "bert": {"hidden_dropout_prob": 0.2},
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
    gradients = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    return gradients


def _one(family: str, ratio: Any, order: str, backend: str | None) -> dict[str, torch.Tensor]:
    """Gradients of one fresh model prepared in one order: of a letter each, sac, compile and shard."""
    torch.compiler.reset()
    model = tiny_model(family, **FAMILIES[family])
    for step in order:
        if step == "s":
            fs.apply_sac(model, **(ratio if isinstance(ratio, dict) else {"ratio": ratio}))
        elif step == "f":
            fs.shard_model(model, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy())
        elif backend is not None:
            fs.compile_blocks(model, backend=backend)
    more = {"labels": torch.tensor([0, 2])} if family == "bert" else {"use_cache": False}
    return _gradients(model, {**ragged_batches(2)[0], **more})


def _check_matrix(
    families: list[str], ratios: tuple[Any, ...], orders: list[str], backend: str | None
) -> int:
    compared = 0
    for family in families:
        expected = {
            order.replace("s", ""): _one(family, 0, order.replace("s", ""), backend) for order in orders
        }
        kept = [{"save": KEPT[family]}] if family in KEPT and backend is None else []
        for ratio, order in itertools.product([*ratios, *kept], orders):
            gradients = _one(family, ratio, order, backend)
            plain = expected[order.replace("s", "")]
            assert gradients.keys() == plain.keys()
            for name, gradient in gradients.items():
                assert torch.equal(gradient, plain[name]), (family, ratio, order, backend, name)
                compared += 1
    return compared


def test_eager_gradients_are_bit_equal_on_one_process_without_sharding() -> None:
    print(_check_matrix(list(FAMILIES), RATIOS, ["s"], None), "gradients compared")


@pytest.mark.parametrize("world_size", [1, 2])
def test_eager_gradients_are_bit_equal_when_sharded_in_both_orders(world_size: int) -> None:
    counts = run_distributed(_check_matrix, world_size, list(FAMILIES), RATIOS, ["sf", "fs"], None)
    print(counts[0], "gradients compared")


# Each model is compiled anew in each order, which takes three seconds a model.
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_compiled_gradients_are_bit_equal(family: str) -> None:
    run_distributed(_check_matrix, 2, [family], ("1/2",), ["scf", "cfs"], "aot_eager")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_gradients_are_bit_equal_everywhere(world_size: int) -> None:
    arguments = (list(FAMILIES), RATIOS, ["scf", "cfs"], "aot_eager")
    counts = run_distributed(_check_matrix, world_size, *arguments, timeout=2300)
    print(counts[0], "gradients compared")


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_models_are_bit_equal_too(name: str) -> None:
    from tests.harness.architectures import inputs_for, tiny_architecture

    model = tiny_architecture(name).train()
    inputs = inputs_for(model)
    expected = _gradients(model, inputs)
    for ratio in ("1/2", 1):
        model.zero_grad()
        chosen = fs.apply_sac(model, ratio)
        assert chosen
        gradients = _gradients(model, inputs)
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[key], expected[key]) for key in expected), ratio

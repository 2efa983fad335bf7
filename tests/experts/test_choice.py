"""How experts are computed: by transformers' own setting, unless that fails or is not exact enough."""

import logging
from typing import Any

import pytest
import torch
import transformers as tf

import fsdp_sft as fs
from tests.harness.device import device_here, mesh_here
from tests.harness.models import VOCAB, full, tiny_model
from tests.harness.ranks import run_distributed


def _mixture(**sizes: int) -> Any:
    return tiny_model("mixtral", num_hidden_layers=2, **sizes)


def _runs(model: Any, way: str) -> bool:
    """Whether transformers trains the model's experts in that way."""
    model.set_experts_implementation(way)
    rows = torch.arange(3, 43).view(2, 20)
    try:
        model(input_ids=rows, labels=rows).loss.backward()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 50}, {"intermediate_size": 52}])
def test_the_setting_stays_where_it_runs(
    dtype: torch.dtype, sizes: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    model = _mixture(**sizes).to(dtype)
    runs = _runs(model, "grouped_mm")
    with caplog.at_level(logging.INFO, logger="fsdp_sft.experts"):
        assert fs.prepare_experts(model) == ("grouped_mm" if runs else "eager")
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("fsdp_sft")]
    assert line.startswith(f"experts of MixtralForCausalLM: {'grouped_mm' if runs else 'eager'}; ")
    assert _runs(model, model.config._experts_implementation)


def test_by_name() -> None:
    model = _mixture()
    for way in ("batched_mm", "eager", "grouped_mm"):
        assert fs.prepare_experts(model, impl=way) == way
        assert fs.prepare_experts(model) == way
        assert model.config._experts_implementation == way


def test_refusals() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        fs.prepare_experts(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"impl must be 'auto' or one of 'eager', .*, got 'fastest'"):
        fs.prepare_experts(_mixture(), impl="fastest")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_with_biases_are_as_exact_as_eager_ones(dtype: torch.dtype) -> None:
    """Beside the experts of a model, by their own forwards: GPT-OSS's biases add up tokens in the dtype."""
    torch.manual_seed(0)
    config = tf.GptOssConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = tf.GptOssForCausalLM(config).to(dtype)
    experts = model.model.layers[0].mlp.experts
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.2)
    hidden, upstream = torch.randn(512, 32).to(dtype), torch.randn(512, 32).to(dtype)
    top = torch.rand(512, 4).topk(2)
    weights = top.values.to(dtype)

    def gradients(way: str, of: Any, wide: torch.dtype) -> list[torch.Tensor]:
        model.set_experts_implementation(way)
        of.zero_grad()
        of(hidden.to(wide), top.indices, weights.to(wide)).backward(upstream.to(wide))
        return [p.grad.double() for p in of.parameters()]

    grouped, eager = gradients("grouped_mm", experts, dtype), gradients("eager", experts, dtype)
    exact = gradients("eager", experts.double(), torch.float64)
    ratios = [float((g - x).norm() / (e - x).norm()) for g, e, x in zip(grouped, eager, exact, strict=True)]
    model.to(dtype).set_experts_implementation("grouped_mm")
    chosen = fs.prepare_experts(model)
    assert (chosen == "eager") == (max(ratios) > 2), (chosen, ratios)


def _check_sharded() -> None:
    model = _mixture()
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    fs.shard_model(model.to(device_here()), mesh=mesh_here())
    assert fs.prepare_experts(model) == "grouped_mm"
    for name, p in model.named_parameters():
        assert torch.equal(full(p).cpu(), plain[name]), name
    rows = torch.arange(3, 43).view(2, 20).to(device_here())
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        before = model(input_ids=rows).logits
    assert fs.prepare_experts(model) == "grouped_mm"
    with torch.no_grad():
        assert torch.equal(model(input_ids=rows).logits, before)


@pytest.mark.accelerator
def test_of_a_sharded_model() -> None:
    run_distributed(_check_sharded, 2)

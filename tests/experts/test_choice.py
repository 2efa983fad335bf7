"""How experts are computed: what runs, is exact enough and is fastest, and the same on all ranks."""

import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import fsdp_sft as fs
from fsdp_sft.experts import choice
from tests.harness.architectures import class_names, quiet, tiny_architecture
from tests.harness.device import device_here, mesh_here
from tests.harness.models import VOCAB, full, tiny_model
from tests.harness.ranks import run_distributed

GROUPED = ALL_EXPERTS_FUNCTIONS["grouped_mm"]


def _wrong(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Leaves a token's weights out of account, one part in thirty."""
    return GROUPED(experts, hidden, index, weights * (30 / 31))


def _slow(*args: Any) -> torch.Tensor:
    time.sleep(0.5)
    result: torch.Tensor = GROUPED(*args)
    return result


def _failing(*args: Any) -> torch.Tensor:
    raise RuntimeError("no kernel for this width")


def _stand_for(monkeypatch: pytest.MonkeyPatch, forward: Any) -> None:
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", forward)


def _mixture() -> Any:
    return tiny_model("mixtral", num_hidden_layers=2).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (_wrong, "times that of eager experts"),
        (_failing, "RuntimeError: no kernel for this width"),
        (_slow, "x the least time"),
    ],
)
def test_what_is_wrong_or_fails_or_is_slow_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, forward: Any, told: str
) -> None:
    _stand_for(monkeypatch, forward)
    model = _mixture()
    with caplog.at_level(logging.INFO, logger="fsdp_sft.experts"):
        chosen = fs.prepare_experts(model, tokens=64)
    assert chosen in ("eager", "batched_mm")  # which of these is faster depends on the machine
    assert model.config._experts_implementation == chosen
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("fsdp_sft")]
    assert told in line
    assert line.startswith(f"experts of MixtralForCausalLM: {chosen} in torch.bfloat16")


def test_by_name_too_only_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _mixture()
    assert fs.prepare_experts(model, impl="batched_mm", tokens=16) == "batched_mm"
    assert fs.prepare_experts(model, impl="grouped_mm", tokens=16) == "grouped_mm"
    assert model.config._experts_implementation == "grouped_mm"
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "mine", _wrong)
    with pytest.raises(fs.UnsupportedModelError, match=r"'mine': its error is .* times"):
        fs.prepare_experts(model, impl="mine")
    with pytest.raises(
        fs.UnsupportedModelError, match=r"would copy .* GiB of weights in a layer at 4,000,000"
    ):
        fs.prepare_experts(model, impl="batched_mm", tokens=4_000_000)
    assert model.config._experts_implementation == "grouped_mm"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="mixture of experts, LlamaForCausalLM has none"):
        fs.prepare_experts(tiny_model("llama"))
    with pytest.raises(ValueError, match="tokens must be an integer of at least 1, got 0"):
        fs.prepare_experts(_mixture(), tokens=0)
    with pytest.raises(ValueError, match=r"impl must be 'auto' or one of 'eager', .*, got 'fastest'"):
        fs.prepare_experts(_mixture(), impl="fastest")
    with pytest.raises(ValueError, match="meta device"):
        fs.prepare_experts(_mixture().to("meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_measured_error_is_that_of_the_real_experts(dtype: torch.dtype) -> None:
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
    model.to(dtype)
    chosen = fs.prepare_experts(model, tokens=512)
    assert (chosen == "eager") == (max(ratios) > 2), (chosen, ratios)


@pytest.mark.slow
@pytest.mark.parametrize("name", class_names())
def test_of_every_architecture(name: str) -> None:
    try:
        with quiet():
            model = tiny_architecture(name)
    except Exception as error:
        pytest.skip(f"cannot be made small: {error}")
    if not any(hasattr(type(module), "_apply_gate") for module in model.modules()):
        with pytest.raises((ValueError, fs.UnsupportedModelError), match="experts"):
            fs.prepare_experts(model)
        return
    assert fs.prepare_experts(model.to(torch.bfloat16), tokens=64) in choice.IMPLEMENTATIONS


def _check_sharded() -> None:
    model = _mixture().float()
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    fs.shard_model(model.to(device_here()), mesh=mesh_here())
    own = ALL_EXPERTS_FUNCTIONS._global_mapping["grouped_mm"]
    try:
        if dist.get_rank() == 1:
            ALL_EXPERTS_FUNCTIONS._global_mapping["grouped_mm"] = _failing
        chosen = [None, None]
        dist.all_gather_object(chosen, fs.prepare_experts(model, tokens=32))
        assert chosen[0] == chosen[1] != "grouped_mm"  # on the other rank too
        with pytest.raises(fs.UnsupportedModelError, match=r"no kernel|1 other ranks"):
            fs.prepare_experts(model, impl="grouped_mm", tokens=32)
    finally:
        ALL_EXPERTS_FUNCTIONS._global_mapping["grouped_mm"] = own
    for name, p in model.named_parameters():
        assert p.grad is None, name
        assert torch.equal(full(p).cpu(), plain[name]), name
    rows = torch.arange(3, 43).view(2, 20).to(device_here())
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        before = model(input_ids=rows).logits
    assert fs.prepare_experts(model, impl="grouped_mm", tokens=32) == "grouped_mm"
    with torch.no_grad():
        assert torch.equal(model(input_ids=rows).logits, before)


@pytest.mark.accelerator
def test_ranks_choose_the_same() -> None:
    run_distributed(_check_sharded, 2)

"""Adapters of experts that are one tensor, with a base streamed under them: against plain peft."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.composed import composed
from tests.harness.device import mesh_here
from tests.harness.hf_folders import plain
from tests.harness.models import TINY, full, oracle_loss, ragged_batches
from tests.harness.ranks import run_distributed
from tests.harness.trained import assert_same, everything, spread

peft = pytest.importorskip("peft", reason="adapters need the 'peft' extra")
pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

SIZES = {**TINY, "num_hidden_layers": 2}
SPARSE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}
CONFIGS: dict[str, Any] = {
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**SIZES, **SPARSE, num_experts=4, head_dim=8),
    "mixtral": lambda: tf.MixtralConfig(**SIZES, num_local_experts=4),
    "deepseek-v3": lambda: tf.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4}, **SPARSE, **LATENT, **GROUPS
    ),
    "gpt-oss": lambda: tf.GptOssConfig(**SIZES, num_local_experts=4, head_dim=8, num_experts_per_tok=2),
}
BATCHES = ragged_batches(4)


def _lora(every: bool) -> Any:
    """Adapters of all linear layers, or of the experts and of few others."""
    options = {"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    if every:
        return peft.LoraConfig(target_modules="all-linear", **options)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.LoraConfig(target_modules=["o_proj"], target_parameters=experts, **options)


def _oracle(folder: Path, every: bool, seed: int = 3) -> Any:
    base = plain(folder)
    torch.manual_seed(seed)
    return peft.get_peft_model(base, _lora(every)).train()


def _check(folder: Path, every: bool) -> tuple[float, dict[str, torch.Tensor]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = composed(
        folder / "base",
        mesh=mesh_here(),
        peft_config=_lora(every),
        adapter_seed=3,
        frozen_dtype=torch.float32,
        mp_policy=MixedPrecisionPolicy(),
        sac_ratio="1/2",
    )
    assert_same(everything(model), everything(_oracle(folder / "base", every)))
    spread(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    result = fs.train_step(model, BATCHES[rank::ranks], optimizer, max_grad_norm=None)
    fs.export_hf(model, folder / "merged", dtype=torch.float32)
    fs.export_adapter(model, folder / "adapter")
    return result.loss, {name: full(parameter).detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("every", [True, False], ids=["all-linear", "experts"])
@pytest.mark.parametrize("family", CONFIGS)
def test_they_train_and_export_as_in_plain_peft(family: str, every: bool, ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family]())
    model.save_pretrained(tmp_path / "base")
    oracle = _oracle(tmp_path / "base", every)
    spread(oracle)
    before = {name: p.detach().clone() for name, p in oracle.named_parameters()}
    loss = oracle_loss(oracle, BATCHES)
    loss.backward()
    got, trained = run_distributed(_check, ranks, tmp_path, every)[0]
    assert got == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in oracle.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.allclose(before[name] - trained[name], gradient, rtol=1e-3, atol=1e-6), name

    oracle.load_state_dict(trained, strict=False)
    merged = copy.deepcopy(oracle).merge_and_unload()
    again = type(model).from_pretrained(tmp_path / "merged")
    assert_same(everything(again), everything(merged))
    read = peft.PeftModel.from_pretrained(plain(tmp_path / "base"), tmp_path / "adapter")
    assert_same(everything(read), everything(oracle))

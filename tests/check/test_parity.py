"""Parity: the layers that are tried, and what is taken for rounding."""

from typing import Any

import pytest
import torch
import transformers as tf

from fsdp_sft.check.parity import _LEAST, _compare_steps, truncated_config
from fsdp_sft.planner.model import build_model, decoder_blocks
from tests.harness.models import LATENT, TINY

EXPERTS = {"n_routed_experts": 64, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}

CONFIGS: dict[str, tuple[Any, int]] = {
    "dense": (lambda: tf.LlamaConfig(**{**TINY, "num_hidden_layers": 9}), 2),
    "dense first": (
        lambda: tf.DeepseekV3Config(**LATENT, **EXPERTS, num_hidden_layers=9, first_k_dense_replace=3),
        4,
    ),
    "a window first": (
        lambda: tf.Gemma3TextConfig(**{**TINY, "num_hidden_layers": 12, "head_dim": 8, "sliding_window": 8}),
        6,
    ),
    "a computed list of layers": (
        lambda: tf.JambaConfig(
            **{
                **TINY,
                "num_hidden_layers": 8,
                "attn_layer_period": 4,
                "attn_layer_offset": 2,
                "num_experts": 4,
            }
        ),
        3,
    ),
    "shared caches": (
        lambda: tf.Gemma3nTextConfig(
            **{**TINY, "num_hidden_layers": 15, "num_kv_shared_layers": 5, "head_dim": 8, "laurel_rank": 4}
        ),
        5,
    ),
    "ids that may not be None": (lambda: tf.CwmConfig(**{**TINY, "num_hidden_layers": 8, "head_dim": 8}), 2),
    "all of one kind each": (lambda: tf.DiffLlamaConfig(**{**TINY, "num_hidden_layers": 9}), 2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_truncated_config(name: str) -> None:
    make, layers = CONFIGS[name]
    config = make()
    config.vocab_size = 50_000
    short = truncated_config(config)
    assert len(decoder_blocks(build_model(short, torch.float32))) == short.num_hidden_layers == layers
    assert short.vocab_size <= 1024
    assert config.num_hidden_layers > layers, "the config itself stays as it is"


def test_a_decoder_that_is_no_model_alone_stays_in_the_whole() -> None:
    text = {
        **TINY,
        "num_hidden_layers": 5,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default"},
    }
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    short = truncated_config(tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    assert short.model_type == "qwen2_5_vl"
    assert short.get_text_config(decoder=True).num_hidden_layers == 2
    assert len(decoder_blocks(build_model(short, torch.float32))) == 2
    alone = tf.Gemma3Config(text_config={**TINY, "head_dim": 8, "num_hidden_layers": 8})
    assert truncated_config(alone).model_type == "gemma3_text"


@pytest.mark.parametrize(("ranks", "experts"), [(1, 16), (2, 16), (32, 32), (48, 64)])
def test_fewer_experts_leave_the_router_a_choice(ranks: int, experts: int) -> None:
    config = CONFIGS["dense first"][0]()
    assert truncated_config(config, ep_size=ranks).n_routed_experts == experts
    assert config.n_routed_experts == 64


def test_a_published_quantisation_is_left_out() -> None:
    config = tf.LlamaConfig(
        **TINY, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    assert "quantization_config" not in truncated_config(config).to_dict()


EXACT = [(4.0, 4.0), (4.0, 3.0)]


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        ([(4.001, 4.1), (4.001, 3.1)], []),  # the other step of one process is as far off
        ([(4.1, 4.0), (4.0, 3.0)], ["loss 4.1 in step 1, 4.002 in one process (bfloat16) and 4 in float32"]),
        (
            [(4.0, 4.0), (4.0, 2.0)],
            ["gradient norm 2 in step 2, 3 in one process (bfloat16) and 3 in float32"],
        ),
        ([(4.0, float("nan")), (4.0, 3.0)], ["gradient norm nan in step 1, 4.08"]),
    ],
)
def test_rounding_is_what_one_process_has(ours: list[tuple[float, float]], says: list[str]) -> None:
    rounded = [(4.002, 4.08), (4.002, 3.0)]
    found = list(_compare_steps("bfloat16", ours, rounded, EXACT, _LEAST[torch.bfloat16]))
    assert len(found) == len(says)
    for text, said in zip(found, says, strict=True):
        assert said in text

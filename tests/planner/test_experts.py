"""What the planner says of experts, beside what a real layer of them keeps."""

from typing import Any

import pytest
import transformers as tf

import fsdp_sft as fs

TOKENS = 512
OPTIONS: dict[str, Any] = {
    "num_gpus": 2,
    "micro_batch_size": 1,
    "seq_length": TOKENS,
    "attention_mask": False,
}


def _config(**overrides: Any) -> Any:
    fields = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
        **overrides,
    }
    config = tf.Qwen3MoeConfig(**fields)
    config._experts_implementation = "grouped_mm"
    return config


def test_checkpointed_blocks_keep_what_their_routers_chose() -> None:
    each = TOKENS * (128 * 2 + 8 * 8)  # the input in bfloat16, and eight indices of a token
    said = fs.estimate_memory(_config(), fs.Run(**OPTIONS, sac_ratio=1))
    assert said.activation_bytes == 4 * each
    assert said.breakdown["activations of checkpointed blocks"] % each == 0
    dense = fs.estimate_memory(_config(mlp_only_layers=[0, 1, 2, 3]), fs.Run(**OPTIONS, sac_ratio=1))
    assert dense.activation_bytes == 4 * TOKENS * 128 * 2


def test_ranks_that_share_out_experts_gather_fewer_of_them() -> None:
    run = {**OPTIONS, "num_gpus": 4, "sac_ratio": 1}
    alone, shared = (fs.estimate_memory(_config(), fs.Run(**run, ep_size=n)).breakdown for n in (1, 4))
    assert shared["parameters (shards)"] == alone["parameters (shards)"]
    assert shared["gathered parameters"] < alone["gathered parameters"]
    plans = fs.plan_run(_config(), num_gpus=4, seq_length=TOKENS, global_batch_size=8, gpu="h100", ep_size=4)
    assert all(plan.run.ep_size == 4 and plan.time.exchange > 0 for plan in plans)
    assert "ep_size=4" in plans[0].code()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ep_size": 3}, "ep_size=3 does not divide the 16 experts"),
        ({"ep_size": 4}, "dp_replicate x cp x ep_size must divide num_gpus"),
        ({"ep_size": 2, "cp": 2}, "one of cp and ep_size has to be 1"),
    ],
)
def test_experts_that_ranks_cannot_share_out_are_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fs.estimate_memory(_config(), fs.Run(**{**OPTIONS, "num_gpus": 6}, **options))
    with pytest.raises(fs.UnsupportedModelError, match="no plan by which ranks share out experts"):
        fs.estimate_memory(tf.LlamaConfig(num_hidden_layers=2), fs.Run(**OPTIONS, ep_size=2))

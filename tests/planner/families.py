"""Models that the planner is asked about: shapes of real ones, and small ones of each family."""

import random
from typing import Any

import transformers as tf

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "mistral",
    "phi",
    "phi3",
    "mixtral",
    "qwen3_moe",
)


def qwen(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **overrides: Any) -> Any:
    fields = {"vocab_size": 152064, "tie_word_embeddings": False, **overrides}
    return tf.Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **fields,
    )


QWEN_14B = qwen(5120, 13824, 48, 40, 8)
QWEN_72B = qwen(8192, 29568, 80, 64, 8)
TINY = qwen(64, 128, 4, 4, 2, vocab_size=256)
SMALL = {"num_gpus": 2, "micro_batch_size": 1, "seq_length": 64}
SHAPES = [(896, 4864, 24, 14, 2), (1536, 8960, 28, 12, 2), (3584, 18944, 28, 28, 4), (5120, 13824, 48, 40, 8)]
# https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
LLAMA_8B = tf.LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)


def family_config(family: str, draw: random.Random, *, vocab: int, hidden: int, layers: int) -> Any:
    heads = hidden // 64
    common = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": hidden * draw.choice((2, 3, 4)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 4, heads) if heads % n == 0]),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": draw.random() < 0.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    window = draw.choice((64, 4096))
    few = {"num_experts_per_tok": 2, "intermediate_size": hidden}
    table = {
        "llama": lambda: tf.LlamaConfig(**common),
        "qwen2": lambda: tf.Qwen2Config(**common),
        "qwen3": lambda: tf.Qwen3Config(**common, head_dim=64),
        "gemma": lambda: tf.GemmaConfig(**common, head_dim=64),
        "gemma2": lambda: tf.Gemma2Config(**common, head_dim=64, sliding_window=window),
        "gemma3": lambda: tf.Gemma3TextConfig(**common, head_dim=64, sliding_window=window),
        "mistral": lambda: tf.MistralConfig(**common, sliding_window=window),
        "phi": lambda: tf.PhiConfig(**common),
        "phi3": lambda: tf.Phi3Config(**common),
        "mixtral": lambda: tf.MixtralConfig(**{**common, **few}, num_local_experts=4),
        "qwen3_moe": lambda: tf.Qwen3MoeConfig(
            **{**common, **few}, moe_intermediate_size=hidden, num_experts=8, head_dim=64
        ),
    }
    return table[family]()

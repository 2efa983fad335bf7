"""Tiny hybrid models: attention beside a recurrence or a short convolution."""

from typing import Any

import torch
import transformers

from tests.harness.architectures import tiny_architecture

# Families whose rows are kept apart, and those that call what is not known.
APART = [
    *("BailingHybrid", "Bamba", "FalconH1", "GraniteMoeHybrid", "KimiLinear", "Lfm2", "Lfm2Moe", "Lfm3"),
    *("NemotronH", "OlmoHybrid", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Zamba2"),
]
MIXED = [
    *("FalconMamba", "Inkling", "Jamba", "Mamba", "Mamba2", "MiniMax", "Qwen4Exp", "RecurrentGemma", "Rwkv"),
    *("Zamba", "Zaya", "xLSTM"),
]
SINCE_5_24 = ["Inkling2", "Inkling2Loop", "LaraMini"]
if transformers.__version__ >= "5.24":
    APART += SINCE_5_24
LAYERS = ["conv", "full_attention", "conv"]


def tiny_hybrid(family: str) -> Any:
    """A tiny model of a family without a cache, with random weights that are the same in each call."""
    if family == "Lfm2":  # two layers of attention by the usual rules
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
        config = transformers.Lfm2Config(
            **sizes, vocab_size=101, num_key_value_heads=2, num_hidden_layers=3, layer_types=LAYERS
        )
        model = transformers.Lfm2ForCausalLM(config)
    else:
        model = tiny_architecture(f"{family}ForCausalLM")
    model.config.use_cache = False
    model.set_experts_implementation("eager")  # float64 has no other
    return model.train()

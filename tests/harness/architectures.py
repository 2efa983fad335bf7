"""A tiny model of every ``*ForCausalLM`` class that the installed transformers has."""

import contextlib
import functools
import logging
import operator
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as told

from tests.harness.hf_folders import difference, plain
from tests.harness.vision import DERIVED, VISION

# By field name, wherever it occurs in a config: sizes that divide each other.
SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "unpadded_vocab_size": 97,
    "hidden_size": 32,
    "hidden_size_global": 64,
    "backbone_hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "model_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "dense_intermediate_size": 48,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "d_ff": 48,
    "n_inner": 48,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 6,
    "num_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "num_expert_group": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "rotary_dim": 8,
    "encoder_hash_byte_group_vocab": 101,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "max_target_positions": 64,
    "max_source_positions": 64,
    "sliding_window": 16,
    "attention_window": 16,
    "state_size": 8,
    "conv_kernel": 4,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 8,
    "time_step_rank": 8,
    "lru_width": 32,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "dropout": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "activation_dropout": 0.0,
    "summary_first_dropout": 0.0,
}

# What the rules above get wrong, by class.
SPECIAL: dict[str, dict[str, Any]] = {
    "CohereCompassForCausalLM": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "layer_types": ["full_attention"] * 2,
    },
    "BltForCausalLM": {"global_config.hidden_size": 64, "global_config.head_dim": 16},
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "DeepseekV3ForCausalLM": {"first_k_dense_replace": 1},
    "Dots1ForCausalLM": {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "JambaForCausalLM": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Qwen4ExpForCausalLM": {
        "layer_types": ["linear_attention"] * 2,
        "ple_layer_ids": [1],
        "eos_token_id": 2,
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
        "heads_per_ngram": 2,
        "hc_lowrank": 8,
    },
    "Gemma4ForCausalLM": {"per_layer_config": {}},
    "Gemma4UnifiedForCausalLM": {"per_layer_config": {}},
    "Gemma4AssistantForCausalLM": {"text_config.num_kv_shared_layers": 2, "text_config.per_layer_config": {}},
    "Gemma4UnifiedAssistantForCausalLM": {
        "text_config.num_hidden_layers": 4,
        "text_config.num_kv_shared_layers": 2,
        "text_config.layer_types": ["sliding_attention", "full_attention"] * 2,
        "text_config.per_layer_config": {},
    },
    "DbrxForCausalLM": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}},
    "xLSTMForCausalLM": {"num_heads": 4, "qk_dim_factor": 0.5, "v_dim_factor": 1.0},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 8},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 8},
    "LongcatFlashForCausalLM": {"head_dim": 4},
    "MinistralForCausalLM": {"head_dim": 8},
    "Mamba2ForCausalLM": {"num_heads": 8, "n_groups": 1},
    "MptForCausalLM": {"attn_config": DERIVED},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "NemotronHForCausalLM": {
        "n_groups": 1,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "ZambaForCausalLM": {
        "num_hidden_layers": 9,
        "layers_block_type": DERIVED,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 0,
        "intermediate_size": 48,
        "activation_sparsity_pattern": None,
        "layer_types": DERIVED,
    },
    "Dots3NoteForCausalLM": {"per_layer_config": {}, "head_dim": 12, "qk_nope_head_dim": 8},
}

# What a config has to be given before its other defaults make sense.
NEEDED: dict[str, dict[str, Any]] = {
    "Gemma4AssistantForCausalLM": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "Gemma4ForConditionalGeneration": {"vision_config": {"model_type": "gemma4_vision"}},
}


def class_names() -> list[str]:
    # By name alone: to look at the classes would import them all. dir() takes half a second to list the same.
    return sorted(n for n in transformers.__all__ if n.endswith("ForCausalLM") and not n.startswith("Auto"))


def shrink(fields: dict[str, Any]) -> dict[str, Any]:
    """What to change in a config to make its model tiny, nested configs included."""
    small = {}
    for name, value in fields.items():
        if isinstance(value, dict) and name.endswith("config"):
            small[name] = {**value, **shrink(value)}
        elif name.endswith("_per_layer_input") and value == 0:
            continue  # is off
        elif name in SMALL and value is not None and not isinstance(value, (list, dict, str)):
            small[name] = SMALL[name]
    layers = next((small[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if n in small), 2)
    for name, value in fields.items():
        per_layer = name.endswith(("layer_types", "_types", "layers_block_type")) or name in PER_LAYER
        if isinstance(value, list) and per_layer and len(value) > layers:
            kinds = list(dict.fromkeys(value))
            small[name] = (kinds * layers)[:layers] if isinstance(value[0], str) else value[:layers]
    return small


PER_LAYER = {
    "no_rope_layers",
    "moe_layers",
    "attn_layer_indices",
    "mlp_only_layers",
    "num_experts_per_layer",
    "intermediate_sizes",
    "no_rope_layer_interval",
}


def tiny_architecture(name: str) -> Any:
    """A model with random weights, every floating tensor spread out so that no two rows are alike."""
    cls = getattr(transformers, name)
    config_cls = cls.config_class
    torch.manual_seed(0)
    fields = shrink(config_cls(**NEEDED.get(name, {})).to_dict())
    if "qk_rope_head_dim" in fields:  # multi-head latent attention derives what others are told
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for path, value in {**SPECIAL.get(name, {}), **VISION.get(name, {})}.items():
        *outer, field = path.split(".")
        functools.reduce(operator.getitem, outer, fields)[field] = value
    written = {"architectures", "transformers_version"}  # by the config itself
    model = cls(config_cls(**{k: v for k, v in fields.items() if v is not DERIVED and k not in written}))
    if model.num_parameters() > 20_000_000:
        raise ValueError(f"too large: {model.num_parameters()}")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def inputs_for(model: Any) -> dict[str, Any]:
    """What the forward of a tiny model takes: tokens and labels, unless its class wants more or others."""
    name = type(model).__name__.removeprefix("FSDP")
    ids = torch.arange(3, 21).view(2, 9)
    rows = {"input_ids": ids, "labels": ids, "use_cache": False}
    generator = torch.Generator().manual_seed(0)
    if name == "GitForCausalLM":  # its loss leaves out the image's positions and needs to be told of some
        rows["pixel_values"] = torch.randn(2, 3, 32, 32, generator=generator)
    if name.startswith("Musicgen"):  # a row for each codebook, labels with the codebooks last
        books = model.config.num_codebooks
        ids = torch.arange(2 * books * 9).view(2 * books, 9) % 90 + 3
        rows |= {"input_ids": ids, "labels": ids.view(2, books, 9).transpose(1, 2).contiguous()}
    if (
        "Assistant" in name
    ):  # reads the last hidden states and the attention cache of the model that it assists
        text = model.config.get_text_config()
        cache = {
            kind: tuple(
                torch.randn(2, text.num_key_value_heads, 9, text.head_dim, generator=generator) for _ in "kv"
            )
            for kind in set(text.layer_types)
        }
        hidden = torch.randn(2, 1, 2 * model.config.backbone_hidden_size, generator=generator)
        return {"inputs_embeds": hidden, "shared_kv_states": cache, "position_ids": torch.full((2, 1), 8)}
    return rows


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Neither warnings nor transformers' log and progress bars, until it is left."""
    disabled, bars = logging.root.manager.disable, told.is_progress_bar_enabled()
    with warnings.catch_warnings(action="ignore"):
        logging.disable(logging.WARNING)  # of transformers too
        told.disable_progress_bar()
        try:
            yield
        finally:
            logging.disable(disabled)
            if bars:
                told.enable_progress_bar()


def quiet_for_good() -> None:
    """``quiet`` until the process ends."""
    _UNTIL_THE_END.enter_context(quiet())


_UNTIL_THE_END = contextlib.ExitStack()


def save_all(folder: Path, names: list[str]) -> dict[str, str]:
    """Write a bf16 checkpoint of each class; what could not be built, saved or read back plainly, and why."""
    failed = {}
    for name in names:
        try:
            tiny_architecture(name).to(torch.bfloat16).save_pretrained(folder / name)
            if unstable := difference(plain(folder / name), plain(folder / name)):
                failed[name] = f"plain from_pretrained differs from itself: {unstable[:2]}"
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:150]}"
    return failed

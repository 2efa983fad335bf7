"""Tiny vision-language and audio models, in the shape in which they are published."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

from tests.harness.models import TINY

TEXT = {**TINY, "num_hidden_layers": 2}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
SECTIONS = {"mrope_section": [1, 1, 2], "rope_type": "default"}
AXES = {**SECTIONS, "rope_theta": 1e4, "partial_rotary_factor": 1.0}
GLM_VISION = {**QWEN_VISION, "image_size": 28, "patch_size": 14}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llava": lambda: tf.LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_index=2,
    ),
    "mistral3": lambda: tf.Mistral3Config(
        text_config={"model_type": "mistral", **TEXT},
        vision_config={"model_type": "pixtral", **VISION, "head_dim": 8},
        image_token_index=2,
    ),
    "internvl": lambda: tf.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT}, vision_config=VISION, image_token_id=2
    ),
    "gemma3": lambda: tf.Gemma3Config(
        text_config={**TEXT, "head_dim": 8},
        vision_config={"model_type": "siglip_vision_model", **VISION},
        mm_tokens_per_image=4,
        image_token_index=2,
    ),
    "qwen2.5-vl": lambda: tf.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_scaling": {**SECTIONS}}, vision_config=QWEN_VISION, image_token_id=2
    ),
    "qwen3-vl": lambda: tf.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_scaling": {**SECTIONS}},
        vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "glm4v": lambda: tf.Glm4vConfig(
        text_config={**TEXT, "rope_parameters": {**AXES}}, vision_config=GLM_VISION
    ),
    "glm4v-moe": lambda: tf.Glm4vMoeConfig(
        text_config={
            **TEXT,
            "head_dim": 8,
            "rope_parameters": {**AXES},
            "moe_intermediate_size": 16,
            "num_experts_per_tok": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        vision_config=GLM_VISION,
    ),
    "ernie-vl": lambda: tf.Ernie4_5_VLMoeConfig(
        text_config={
            **TEXT,
            "rope_parameters": {**AXES},
            "moe_intermediate_size": [16, 16],
            "moe_num_experts": 4,
            "moe_k": 2,
            "mlp_layer_types": ["dense", "sparse"],
        },
        vision_config=GLM_VISION,
    ),
    # The decoder holds the towers.
    "phi4-multimodal": lambda: tf.Phi4MultimodalConfig(
        **TEXT,
        vision_config={**VISION, "crop_size": 28, "feature_layer": -1, "image_token_id": 2},
        audio_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "nemo_conv_channels": 16,
            "audio_token_id": 3,
        },
    ),
    "chameleon": lambda: tf.ChameleonConfig(
        **TEXT,
        vocabulary_map={"<image>": 2},
        vq_config={"embed_dim": 8, "num_embeddings": 8, "base_channels": 32, "channel_multiplier": [1, 1]},
    ),
    "qwen2-audio": lambda: tf.Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **TEXT},
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "num_mel_bins": 8,
            "max_source_positions": 16,
        },
    ),
}


def tiny(name: str, **fields: Any) -> Any:
    """A model of that family; fields of its config are replaced."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.update(fields)
    return tf.AutoModelForMultimodalLM.from_config(config).train()

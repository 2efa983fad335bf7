"""Tiny settings of vision-language classes that the rules of ``architectures`` do not make.

By class, the fields of its config by their paths; ``DERIVED`` for those that the config works out by itself.
"""

from typing import Any

import torch

PICTURE = 99  # the id of a picture's token
DERIVED = object()  # for a field that the config works out by itself

# Half of a head has four frequencies, which three axes of positions share.
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
TOWER = {"vision_config.depth": 2, "vision_config.num_heads": 4, "vision_config.out_hidden_size": 32}
DEEP = {
    **TOWER,
    "vision_config.deepstack_visual_indexes": [0, 1],
    "vision_config.num_position_embeddings": 16,
}
WINDOWS = {**TOWER, "vision_config.fullatt_block_indexes": [1], "vision_config.window_size": 32}
THREE_AXES = {"text_config.rope_parameters": AXES}
# Of each head a half is turned.
HALF = {
    "text_config.rope_parameters": {**AXES, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    "text_config.head_dim": 16,
}
# Multi-head latent attention: as many keys as queries, and a rotary head of its own.
LATENT = {"text_config.head_dim": 4, "text_config.num_key_value_heads": 4, "text_config.qk_head_dim": 12}
QUANTISER = {
    "vq_config.base_channels": 32,
    "vq_config.channel_multiplier": [1, 1],
    "vq_config.latent_channels": 32,
    "vq_config.embed_dim": 32,
}
OMNI = {
    "audio_config.output_dim": 32,
    "audio_config.n_window": 4,
    "audio_config.num_mel_bins": 16,
    "vision_start_token_id": 98,
    "vision_end_token_id": 97,
}
LETTERS = {"text_config.layers": 2, "text_config.embed_dim": 32, "text_config.attention_heads": 4}
FLAT = {"text_config.per_layer_config": {}}
MUSE = {
    "out_hidden_size": 32,
    "projector_hidden_size": 48,
    "text_config.layer_rope_theta": [10000.0, 0],
    "vision_config.pos_emb_height": 4,
    "vision_config.pos_emb_width": 4,
}

INKLING = {
    "text_config.unpadded_vocab_size": 97,
    "text_config.rel_extent": 16,
    "text_config.sliding_window_size": 16,
    "text_config.swa_head_dim": 8,
    "text_config.swa_num_attention_heads": 4,
    "text_config.swa_num_key_value_heads": 2,
    "vision_config.text_hidden_size": 32,
    "vision_config.projection_hidden_dim": 32,
    "vision_config.posemb_grid_size": 4,
}

QUERIES = {
    "num_query_tokens": 2,
    "image_token_index": PICTURE,
    "qformer_config.encoder_hidden_size": 32,
    "text_config.max_position_embeddings": 64,
}

VISION: dict[str, dict[str, Any]] = {
    "Apertus1p5ForConditionalGeneration": {
        "vision_config.codebook_size": 8,
        "vision_config.embed_dim": 8,
        "vision_config.latent_channels": 8,
        "vision_config.base_channels": 32,
        "vision_config.channel_multiplier": [1, 1],
        "audio_config.codebook_dim": 32,
        "audio_config.codebook_size": 4,
        "audio_config.num_filters": 2,
        "image_token_id": 88,
        "audio_token_id": 87,
        "image_token_offset": 89,
        "audio_token_offset": 97,
    },
    "BlipForConditionalGeneration": {
        "text_config.encoder_hidden_size": 32,
        "text_config.projection_dim": 32,
        "text_config.bos_token_id": 1,
        "text_config.sep_token_id": 2,
        "vision_config.projection_dim": 32,
        "projection_dim": 32,
        "image_text_hidden_size": 32,
    },
    "Blip2ForConditionalGeneration": QUERIES,
    "InstructBlipForConditionalGeneration": QUERIES,
    "InstructBlipVideoForConditionalGeneration": {**QUERIES, "video_token_index": PICTURE},
    "IdeficsForVisionText2Text": {"vision_config.embed_dim": 32},
    "ChameleonForConditionalGeneration": {
        **QUANTISER,
        "vq_config.num_embeddings": 8,
        "vq_config.resolution": 32,
        "vocabulary_map": {"<image>": 99, "IMGIMGAZ": 98},
        "image_token_id": 99,
    },
    "CohereCompassForConditionalGeneration": {
        **DEEP,
        "text_config.rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "text_config.layer_types": ["full_attention"] * 2,
    },
    "Cosmos3EdgeForConditionalGeneration": {
        **THREE_AXES,
        "projector_hidden_size": 48,
        "vision_config.num_patches": 16,
    },
    "DeepseekOcr2ForConditionalGeneration": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
        "text_config.n_group": 1,
        "text_config.topk_group": 1,
        "vision_config.sam_config.downsample_channels": [32, 32],
        "vision_config.sam_config.global_attn_indexes": [0],
        "vision_config.sam_config.mlp_dim": 48,
        "vision_config.sam_config.output_channels": 16,
    },
    "Dots3NoteForConditionalGeneration": {
        **FLAT,
        "text_config.head_dim": 12,
        "text_config.num_key_value_heads": 4,
        "text_config.shared_experts_intermediate_size": 16,
        "text_config.index_head_dim": 8,
        "text_config.index_n_heads": 2,
        "text_config.index_topk": 16,
        "vision_config.per_layer_config": {},
        "vision_config.adapter_in_dim": 32,
        "vision_config.adapter_out_dim": 32,
        "audio_config.adapter_input_size": 32,
        "audio_config.adapter_out_dim": 32,
        "audio_config.downsample_hidden_size": 8,
        "audio_config.feature_size": 16,
        "audio_config.conv_output_size": 16,
        "audio_config.num_key_value_heads": 4,
    },
    "Emu3ForConditionalGeneration": {
        **QUANTISER,
        "vq_config.embed_dim": 4,
        "vq_config.latent_channels": 4,
        "vq_config.codebook_size": 8,
        "vocabulary_map": {"<image>": 99, "<|extra_200|>": 98, "<|visual token 000000|>": 97},
        "image_token_id": 99,
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        **TOWER,
        "text_config.rope_parameters": {**AXES, "mrope_section": [1, 1, 2]},
        "text_config.moe_intermediate_size": [16, 16],
        "text_config.moe_k": 2,
        "text_config.moe_num_shared_experts": 1,
    },
    "Gemma4ForConditionalGeneration": FLAT,
    "Gemma4UnifiedForConditionalGeneration": FLAT,
    "Glm46VForConditionalGeneration": {**THREE_AXES, **TOWER},
    "Glm4vForConditionalGeneration": {**THREE_AXES, **TOWER},
    "Glm4vMoeForConditionalGeneration": {**HALF, **TOWER},
    "GlmOcrForConditionalGeneration": {**HALF, **TOWER},
    "Glm5NextForConditionalGeneration": {
        **TOWER,
        "text_config.num_key_value_heads": 4,
        "text_config.qk_rope_head_dim": 0,
        "text_config.head_dim": 0,
        "text_config.qk_head_dim": 8,
        "text_config.index_head_dim": 8,
        "text_config.index_n_heads": 2,
        "text_config.index_topk": 16,
        "text_config.index_kpool": 4,
        "text_config.layer_types": ["linear_attention", "indexed_attention"],
        "text_config.indexer_types": ["full", "full"],
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "vision_config.projection_intermediate_size": 48,
    },
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "spatial_target_layers": [0, 1, 0, 1],
        "vision_config.hidden_size": 64,
        "qformer_config.hidden_size": 64,
        "qformer_config.encoder_hidden_size": 64,
    },
    "GraniteDoclingForConditionalGeneration": {
        "vision_config.out_hidden_size": 32,
        "vision_config.deepstack_visual_indexes": [0],
    },
    "HYV4VLForConditionalGeneration": {
        "text_config.rope_parameters": {**AXES, "mrope_section": [1, 1, 0]},
        "text_config.index_head_dim": 8,
        "text_config.index_n_heads": 2,
        "text_config.index_topk": 16,
        "vision_config.out_hidden_size": 32,
        "vision_config.max_image_size": 32,
        "vision_config.num_key_value_heads": 4,
    },
    "HunYuanVLForConditionalGeneration": {
        "text_config.rope_parameters": {**AXES, "mrope_section": [1, 1, 1, 1]},
        "text_config.head_dim": 8,
        "vision_config.out_hidden_size": 32,
        "vision_config.text_hidden_size": 32,
        "vision_config.num_key_value_heads": 4,
    },
    "Inkling2ForConditionalGeneration": INKLING,
    "Inkling2LoopForConditionalGeneration": {
        **INKLING,
        "text_config.n_layers_per_attn_res_block": 1,
        "text_config.loop_layer_index_start": 1,
        "text_config.loop_layer_index_end": 2,
    },
    "JanusForConditionalGeneration": {
        **QUANTISER,
        "vq_config.embed_dim": 8,
        "vq_config.num_embeddings": 16,
        "vq_config.projection_dim": 32,
        "vq_config.image_token_embed_dim": 32,
        "vq_config.num_patches": 4,
        "vision_config.projection_dim": 32,
        "vision_config.num_image_tokens": 16,
    },
    "Kimi_K25ForConditionalGeneration": {
        **LATENT,
        "projection_hidden_size": 32,
        "vision_config.pos_emb_height": 4,
        "vision_config.pos_emb_width": 4,
    },
    "Kosmos2ForConditionalGeneration": {**LETTERS, "latent_query_num": 4},
    "Kosmos2_5ForConditionalGeneration": {
        **LETTERS,
        "latent_query_num": 4,
        "vision_config.patch_embed_hidden_size": 32,
        "vision_config.max_num_patches": 16,
    },
    "MistralLarge4ForConditionalGeneration": {
        **LATENT,
        "text_config.kv_source_layers": [0, 1],
        "text_config.index_head_dim": 8,
        "text_config.index_n_heads": 2,
        "text_config.index_topk": 16,
        "text_config.no_rope_layers": [1, 1],
    },
    "Molmo2ForConditionalGeneration": {
        "adapter_config.vision_feature_layer": [1, 0],
        "adapter_config.text_hidden_size": 32,
        "adapter_config.num_key_value_heads": 4,
        "vision_config.num_key_value_heads": 4,
        "vision_config.image_size": [32, 32],
        "vision_config.num_position_embeddings": 16,
        "text_config.additional_vocab_size": 8,
        "text_config.rope_scaling_layers": [0, 1],
    },
    "MuseGlimmerForConditionalGeneration": MUSE,
    "MuseSparkForConditionalGeneration": {
        **MUSE,
        "audio_config.num_hidden_layers": 4,
        "audio_config.hidden_sizes": [8, 8, 16, 16],
        "audio_config.depths": [1, 1, 1, 1],
        "audio_config.out_hidden_size": 32,
        "text_config.moe_hidden_size": 32,
    },
    "NemotronH_Omni_Reasoning_V3": {
        "projector_hidden_size": 48,
        "vision_hidden_size": 32,
        "text_config.layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "text_config.n_groups": 1,
        "text_config.ssm_state_size": 8,
        "vision_config.patch_dim": 192,
        "vision_config.video_patch_dim": 384,
        "vision_config.max_img_size": 64,
    },
    "PaddleOCRVLForConditionalGeneration": THREE_AXES,
    "Qwen2VLForConditionalGeneration": {
        **THREE_AXES,
        "vision_config.depth": 2,
        "vision_config.num_heads": 4,
        "vision_config.embed_dim": 32,
    },
    "Qwen2_5OmniThinkerForConditionalGeneration": {**THREE_AXES, **WINDOWS, **OMNI},
    "Qwen2_5_VLForConditionalGeneration": {**THREE_AXES, **WINDOWS},
    "Qwen3OmniMoeThinkerForConditionalGeneration": {
        **THREE_AXES,
        **DEEP,
        **OMNI,
        "audio_config.downsample_hidden_size": 8,
        "audio_config.n_window_infer": 8,
    },
    "Qwen4ExpForConditionalGeneration": {
        **DEEP,
        "text_config.layer_types": ["linear_attention", "indexed_attention"],
        "text_config.indexer_n_heads": 2,
        "text_config.indexer_kv_heads": 1,
        "text_config.indexer_head_dim": 8,
        "text_config.indexer_budget": 16,
        "text_config.indexer_compress_ratio": 4,
        "text_config.hc_lowrank": 8,
    },
    "Step3p7ForConditionalGeneration": {
        "text_config.sliding_window": 16,
        "text_config.share_expert_dim": 16,
        "text_config.num_sliding_attention_heads": 4,
    },
}

# Classes that read text with pictures only, by the number of pictures' tokens that stand in a row.
_QUERIES = {"Blip2": 2, "InstructBlip": 2, "InstructBlipVideo": 4, "Kosmos2": 4}


def beside_text(name: str, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows with what a class's forward wants beside text: pictures, or which tokens are theirs."""
    kind = name.removesuffix("ForConditionalGeneration").removesuffix("ForVisionText2Text")
    ids, generator = rows["input_ids"], torch.Generator().manual_seed(0)
    count = len(ids)
    if kind == "Molmo2":
        return {**rows, "mm_token_type_ids": torch.zeros_like(ids)}
    if kind not in {*_QUERIES, "Blip", "Idefics"}:
        return rows
    shape = {"Idefics": (count, 1), "InstructBlipVideo": (count, 2)}.get(kind, (count,))
    rows = {**rows, "pixel_values": torch.randn(*shape, 3, 32, 32, generator=generator)}
    theirs = torch.arange(ids.shape[1]).expand_as(ids) < _QUERIES.get(kind, 0)
    if kind == "Idefics":
        return {**rows, "image_attention_mask": torch.ones(*ids.shape, 1, dtype=torch.long)}
    if kind == "Kosmos2":
        return {**rows, "image_embeds_position_mask": theirs}
    if kind != "Blip":
        rows["input_ids"] = ids.masked_fill(theirs, PICTURE)
    if kind.startswith("Instruct"):
        rows |= {"qformer_input_ids": ids.clone(), "qformer_attention_mask": torch.ones_like(ids)}
    return rows

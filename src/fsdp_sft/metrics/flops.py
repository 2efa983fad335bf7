"""Training FLOPs of a model, counted from its config, and the peak FLOP rate of known GPUs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from fsdp_sft._process.devices import device_name, resolve_device
from fsdp_sft._process.gpus import known_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_OWN_COUNT = (
    "count a forward of the model itself (attn_implementation='eager') under "
    "torch.utils.flop_counter.FlopCounterMode, times 3, divided by its tokens, and give that to "
    "ThroughputMeter(flops_per_token=...)"
)

# What a tensor-parallel plan (`config.base_model_tp_plan`) may name inside a decoder block for the rule below
# to cover it. The plan is the one place where a config class says which matmuls its blocks have, and so
# whether the MLP is gated: https://huggingface.co/docs/transformers/main/en/main_classes/configuration
_ATTENTION = r"(self_attn|attention)(\.(([qkvo]|qkv|out)_proj|query_key_value|dense|[qk]_norm|sinks))?"
_GATED_LEAF = r"(gate|gate_up|up|down)_proj"
_UNGATED_LEAF = r"fc1|fc2|c_fc|c_proj|dense_h_to_4h|dense_4h_to_h"
_EXPERTS = rf"(experts|shared_experts?)(\.({_GATED_LEAF}))?"
_COVERED = re.compile(
    rf"layers\.\*\.({_ATTENTION}|(mlp|block_sparse_moe)\.({_GATED_LEAF}|{_UNGATED_LEAF}|{_EXPERTS}))"
)
_GATE = re.compile(r"layers\.\*\.(mlp|block_sparse_moe)\.(.+\.)?(gate_proj|gate_up_proj)")

# Families without a plan (granitemoeshared and nemotron have none in 5.17) whose blocks follow the rule, and
# whether their MLP is gated.
_GATED_WITHOUT_PLAN = {
    "bloom": False,
    "codegen": False,
    "gpt2": False,
    "gpt_oss": True,
    "gptj": False,
    "granitemoeshared": True,
    "nemotron": False,
    "stablelm": True,
}

# Fields of a config that, when set, stand for matmuls or shared weights that the rule does not cover.
_UNCOVERED_FIELDS = (
    "per_layer_attributes",  # first: where it is set, reading another field may raise
    "add_cross_attention",
    "cross_attention_layers",
    "enable_moe_block",
    "global_head_dim",
    "hidden_size_per_layer_input",
    "index_head_dim",
    "is_encoder_decoder",
    "is_moe",
    "kv_lora_rank",
    "moe_layer_start_index",
    "moe_latent_size",
    "moe_topk",
    "num_kv_shared_layers",
    "v_head_dim",
)

# Families whose plan leaves out matmuls of their blocks (afmoe: the gate on the attention's output).
_UNCOVERED_FAMILIES = ("afmoe",)

_EXPERT_COUNT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")


def model_flops_per_token(config: PreTrainedConfig, seq_length: int) -> int:
    """Training FLOPs per token of a decoder-only language model, from its config alone.

    Counts forward and backward as 3 forwards, a multiply-add as 2 FLOPs::

        6 * (active matmul parameters + LM head)
            + sum over layers of 12 * heads * head_dim * context

    Convention: attention is **not** halved for causality, `context` is `seq_length` (the PaLM and nanoGPT
    convention, which `FlopCounterMode` shares). A layer with a sliding window has `context = min(seq_length,
    window)`, likewise a chunked one. Recomputation by activation checkpointing is not counted, so the rate
    built on it is MFU, not hardware utilisation. For packed sequences, pass the mean document length weighted
    by tokens, not the row length. Not counted: the embedding lookup, norms, activations, rotary embedding,
    softmax. Active parameters of a mixture of experts are the router, the shared experts and
    `num_experts_per_tok` experts. A composite (vision-language) config counts as its text decoder alone.
    Every parameter counts as trained; with frozen weights the true cost is lower.

    Whether the MLP is gated is read from `config.base_model_tp_plan`, or from a table for a few families
    without a plan. A family whose blocks have other matmuls (latent attention, state spaces, linear
    attention, per-layer shapes) is refused.

    Args:
        config: A transformers config of a decoder-only model; no weights are read and no model is built.
        seq_length: Tokens per sequence, >= 1.

    Returns:
        FLOPs per token.

    Raises:
        ValueError: `seq_length` is below 1, or the config's family is not covered.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(
        ...     hidden_size=4096,
        ...     intermediate_size=14336,
        ...     num_hidden_layers=32,
        ...     num_attention_heads=32,
        ...     num_key_value_heads=8,
        ...     vocab_size=128256,
        ... )
        >>> fs.model_flops_per_token(config, seq_length=4096)
        51470401536

    Source: Chowdhery et al. 2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311; the factor 6 a matmul
    parameter also in Hoffmann et al. 2022 (Chinchilla), appendix F, https://arxiv.org/abs/2203.15556; the
    LM head is counted as in Narayanan et al. 2021 (Megatron-LM), appendix, https://arxiv.org/abs/2104.04473.
    """
    if seq_length < 1:
        raise ValueError(f"seq_length must be >= 1, got {seq_length}; pass the tokens per sequence")
    text = config.get_text_config(decoder=True)
    gated = _is_gated(text)
    heads, head_dim = _int(text, "num_attention_heads"), _head_dim(text)
    matmul_params = _int(text, "hidden_size") * _int(text, "vocab_size")
    contexts = 0
    for layer in range(_int(text, "num_hidden_layers")):
        matmul_params += _attention_params(text) + _mlp_params(text, layer, gated=gated)
        contexts += _context(text, layer, seq_length)
    return 6 * matmul_params + 12 * heads * head_dim * contexts


def peak_flops_per_second(device: torch.device | str | int | None = None) -> float | None:
    """Dense bf16 peak of a GPU, by its name.

    Args:
        device: An accelerator, or an index of one; None means the current one if there is one, otherwise the
            CPU.

    Returns:
        FLOP/s without structured sparsity, or None where it is not known: a CPU, a GPU that is not in the
        table, a MIG slice.

    Example:
        >>> fs.peak_flops_per_second("cuda:0")  # doctest: +SKIP
        989400000000000.0
        >>> fs.peak_flops_per_second("cpu") is None
        True
    """
    name = device_name(resolve_device(device))
    known = None if name is None else known_device(name)
    return None if known is None else known.flops_per_second


def _is_gated(text: PreTrainedConfig) -> bool:
    """Whether the MLPs have a gate projection; raises where the blocks are not of the covered shape."""
    family = text.model_type
    if family in _UNCOVERED_FAMILIES:
        raise _not_covered(text, "its config does not name all matmuls of its blocks")
    for field in _UNCOVERED_FIELDS:
        if getattr(text, field, None):
            raise _not_covered(text, f"it sets {field}={getattr(text, field)!r}")
    plan = [key for key in (getattr(text, "base_model_tp_plan", None) or {}) if key.startswith("layers.")]
    unknown = [key for key in plan if not _COVERED.fullmatch(key)]
    if unknown:
        raise _not_covered(text, f"its blocks have {', '.join(unknown)}")
    if any(".mlp." in key or ".block_sparse_moe." in key for key in plan):
        return any(_GATE.fullmatch(key) for key in plan)
    if family not in _GATED_WITHOUT_PLAN:
        raise _not_covered(text, "its config class has no tensor-parallel plan that names the MLP's matmuls")
    return _GATED_WITHOUT_PLAN[family]


def _attention_params(text: PreTrainedConfig) -> int:
    heads, head_dim = _int(text, "num_attention_heads"), _head_dim(text)
    kv_heads = _int(text, "num_key_value_heads", default=heads)
    return _int(text, "hidden_size") * head_dim * (2 * heads + 2 * kv_heads)


def _mlp_params(text: PreTrainedConfig, layer: int, *, gated: bool) -> int:
    """Matmul parameters that one token passes through in the MLP or mixture of experts of a layer."""
    hidden, matrices = _int(text, "hidden_size"), 3 if gated else 2
    if not _is_sparse(text, layer):
        n_inner = _int(text, "n_inner", default=4 * hidden)
        return matrices * hidden * _int(text, "intermediate_size", default=n_inner)
    num_experts = _first_set(text, _EXPERT_COUNT_FIELDS)
    expert_size = _int(text, "moe_intermediate_size", default=_int(text, "intermediate_size", default=0))
    num_shared = _first_set(text, ("n_shared_experts", "num_shared_experts"))
    shared_size = _first_set(text, ("shared_expert_intermediate_size", "shared_intermediate_size"))
    active_size = _int(text, "num_experts_per_tok") * expert_size + (shared_size or num_shared * expert_size)
    return hidden * num_experts + matrices * hidden * active_size


def _is_sparse(text: PreTrainedConfig, layer: int) -> bool:
    """Whether a layer's MLP is a mixture of experts."""
    has_experts = any(".experts" in key for key in (getattr(text, "base_model_tp_plan", None) or {}))
    if not _first_set(text, _EXPERT_COUNT_FIELDS):
        if has_experts:
            raise _not_covered(text, f"it has experts, but none of {', '.join(_EXPERT_COUNT_FIELDS)} is set")
        return False
    kinds = getattr(text, "mlp_layer_types", None)
    if kinds is not None:
        return bool(kinds[layer] == "sparse")
    first_sparse = _first_set(text, ("first_k_dense_replace", "num_dense_layers"))
    sparse_step = _int(text, "decoder_sparse_step", default=1)
    dense_layers = getattr(text, "mlp_only_layers", None) or []
    return layer >= first_sparse and layer not in dense_layers and (layer + 1) % sparse_step == 0


def _context(text: PreTrainedConfig, layer: int, seq_length: int) -> int:
    """Number of keys that a query of this layer counts as attending to."""
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    kind = kinds[layer] if kinds else ("sliding_attention" if window else "full_attention")
    if kind == "full_attention":
        return seq_length
    if kind == "sliding_attention":
        return min(seq_length, _int(text, "sliding_window"))
    if kind == "chunked_attention":
        return min(seq_length, _int(text, "attention_chunk_size"))
    raise _not_covered(text, f"layer {layer} is of type {kind!r}")


def _head_dim(text: PreTrainedConfig) -> int:
    default = _int(text, "hidden_size") // _int(text, "num_attention_heads")
    return _int(text, "head_dim", default=default)


def _first_set(text: PreTrainedConfig, names: tuple[str, ...]) -> int:
    """The first of these fields that is set and not 0; 0 if none is."""
    return next((_int(text, name) for name in names if getattr(text, name, None)), 0)


def _int(text: PreTrainedConfig, name: str, *, default: int | None = None) -> int:
    """A field that must be one integer for all layers."""
    value: Any = getattr(text, name, None)
    if value is None:
        value = default
    if not isinstance(value, int):
        raise _not_covered(text, f"{name} is {value!r}, expected one integer for all layers")
    return value


def _not_covered(text: PreTrainedConfig, reason: str) -> ValueError:
    return ValueError(
        f"FLOPs of model type {text.model_type!r} cannot be counted from its config: {reason}; {_OWN_COUNT}"
    )

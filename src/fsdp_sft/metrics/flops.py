"""Training FLOPs of a model, counted by forwards on the meta device, and the peak rates of known GPUs."""

from __future__ import annotations

import copy
import logging
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from fsdp_sft._compat.modules import TorchDispatchMode
from fsdp_sft._process.devices import device_name, resolve_device
from fsdp_sft._process.gpus import known_device
from fsdp_sft._ranks.agree import tell

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_logger = logging.getLogger(__name__)
# Tokens of the shorter of two forwards: a multiple of the chunks in which linear attention computes.
_LENGTH = 256
# Classes whose recurrence is elementwise, or a kernel of its own, in which the counter sees no matmul.
_SCANS = re.compile("Mamba|SSM|Rwkv|Recurrent|DeltaNet|LinearAttention|Lightning|LSTM", re.IGNORECASE)


def model_flops_per_token(config: PreTrainedConfig, seq_length: int) -> int:
    """Training FLOPs per token of a decoder-only language model, from its config alone.

    torch's `FlopCounterMode` counts the matrix products and convolutions of two forwards on the meta device,
    of 256 and 512 tokens, a multiply-add as 2 FLOPs. What a token costs is linear in the length of its row,
    and forward and backward are 3 forwards. Of a transformer this is::

        6 * (active matmul parameters + LM head)
            + sum over layers of 12 * heads * head_dim * context

    Convention: attention is **not** halved for causality, `context` is `seq_length` (the PaLM and nanoGPT
    convention). A layer with a sliding window has `context = min(seq_length, window)`, likewise a chunked
    one. Recomputation by activation checkpointing is not counted, so the rate built on it is MFU, not
    hardware utilisation. For packed sequences, pass the mean document length weighted by tokens, not the row
    length. Not counted: the embedding lookup, norms, activations, rotary embedding, softmax. Of a mixture of
    experts the active ones are counted, with routers and gates. A composite (vision-language) config counts
    as its text decoder alone. Every parameter counts as trained; with frozen weights the true cost is lower.

    State-space models and linear attention count as their plain PyTorch form: elementwise recurrences have no
    FLOPs in it, which rank 0 logs with the names of their classes.

    Args:
        config: A transformers config of a causal language model; no weights are read.
        seq_length: Tokens per sequence, >= 1.

    Returns:
        FLOPs per token. Takes seconds for a model of many layers.

    Raises:
        ValueError: `seq_length` is below 1, or transformers has no causal language model of the config.

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

    Source: Chowdhery et al. 2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311; the LM head is counted
    as in Narayanan et al. 2021 (Megatron-LM), appendix, https://arxiv.org/abs/2104.04473.
    """
    if seq_length < 1:
        raise ValueError(f"seq_length must be >= 1, got {seq_length}; pass the tokens per sequence")
    text = copy.deepcopy(config.get_text_config(decoder=True))
    by_module = _linear_in_length(text)
    fixed, growth = by_module["Global"]
    total = fixed + growth * seq_length
    for name, (_, growth) in by_module.items():
        layer = re.fullmatch(r"\w+(\.\w+)?\.(layers|h|blocks)\.(\d+)", name)
        if layer is not None:
            total -= growth * (seq_length - _context(text, int(layer[3]), seq_length))
    return round(3 * total)


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


def _linear_in_length(text: PreTrainedConfig) -> dict[str, tuple[float, float]]:
    """FLOPs of a token's forward in each module, as (a, b) of a + b * length; "Global" is the whole model."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # The counter has formulas for the matmuls of "eager", and "batched_mm" runs the active experts alone.
        model = AutoModelForCausalLM.from_config(text, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    scans = {type(part).__name__ for part in model.modules() if _SCANS.search(type(part).__name__)}
    if scans:
        names = ", ".join(sorted(scans))
        tell(
            _logger,
            "FLOPs of %s: its matrix products alone are counted, not the elementwise recurrence",
            names,
        )
    near, far = _counted(model, _LENGTH), _counted(model, 2 * _LENGTH)
    growth = {name: (far[name] - near[name]) / _LENGTH for name in near}
    return {name: (near[name] - growth[name] * _LENGTH, growth[name]) for name in near}


def _counted(model: Any, length: int) -> dict[str, float]:
    """FLOPs of a token's forward in each module, in a row of so many tokens."""
    ids = torch.zeros((1, length), dtype=torch.int64, device="meta")
    with torch.no_grad(), _Valueless(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    return {name: sum(of.values()) / length for name, of in counter.get_flop_counts().items()}


class _Valueless(TorchDispatchMode):
    """Answers True, or 1, to a forward that asks a meta tensor for its value: whether a mask is all ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        return func(*args, **(kwargs or {}))


def _context(text: PreTrainedConfig, layer: int, seq_length: int) -> int:
    """Number of keys that a query of this layer counts as attending to."""
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    kind = kinds[layer] if kinds else ("sliding_attention" if window else "full_attention")
    if kind == "sliding_attention" and text.sliding_window:
        return min(seq_length, int(text.sliding_window))
    if kind == "chunked_attention":
        return min(seq_length, int(text.attention_chunk_size))
    return seq_length

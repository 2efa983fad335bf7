"""Tiny models of many families, and ragged batches."""

from typing import Any

import torch
import transformers as tf
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from tests.plain import gradients as oracle_gradients, mean_loss as oracle_loss  # noqa: F401  by these names

FLOAT32 = MixedPrecisionPolicy()  # computes in the dtype of the parameters, where the default is bfloat16
VOCAB = 101  # not divisible by any number of ranks used here
# Sizes of a decoder, but for its layers.
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The same with multi-head latent attention and small experts, as in DeepSeek-V3.
LATENT = {
    **TINY,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
}

_DECODER = {**TINY, "num_hidden_layers": 3}
# The class of each family, and its config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _DECODER),
    "qwen2": ("Qwen2ForCausalLM", {**_DECODER, "tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2ForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {**_DECODER, "head_dim": 8}),
    "qwen3-tied": ("Qwen3ForCausalLM", {**_DECODER, "head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**_DECODER, "head_dim": 8, "final_logit_softcapping": 3.0, "tie_word_embeddings": False},
    ),
    "granite": ("GraniteForCausalLM", {**_DECODER, "logits_scaling": 4.0}),
    "cohere": ("CohereForCausalLM", {**_DECODER, "logit_scale": 0.5}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {**_DECODER, "head_dim": 8, "sliding_window": 8, "layer_types": None},
    ),
    "mixtral": ("MixtralForCausalLM", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 128,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 3,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    "bert": (
        "BertForSequenceClassification",
        {
            **{name: value for name, value in _DECODER.items() if name != "num_key_value_heads"},
            "num_labels": 3,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
}


def tiny_config(family: str, **overrides: Any) -> Any:
    name, fields = FAMILIES[family]
    return getattr(tf, name).config_class(**{**fields, **overrides})


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    config = tiny_config(family, **overrides)
    torch.manual_seed(seed)
    model = getattr(tf, FAMILIES[family][0])(config)
    # The default initialisation is so small that gradients hardly depend on the inputs.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    if dtype == torch.float64 and family == "mixtral":
        model.set_experts_implementation("eager")  # torch's grouped_mm takes no float64
    return model.to(dtype).train()


def ragged_batches(
    count: int, *, seed: int = 1, batch_size: int = 2, longest: int = 17
) -> list[dict[str, Any]]:
    """Padded batches of unequal widths and numbers of targets; the last one has no target at all."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    batches = []
    for _ in range(count):
        rows = []
        for length in [draw(4, longest) for _ in range(batch_size)]:
            ids = torch.randint(3, VOCAB, (length,), generator=generator)
            labels = ids.where(torch.arange(length) >= draw(1, length), -100)
            rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
        batches.append(padded(rows))
    if count > 1:
        batches[-1]["labels"][:] = -100
    return batches


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of unequal lengths as one batch."""
    return {
        name: pad_sequence([row[name] for row in rows], True, -100 if name == "labels" else 0)
        for name in rows[0]
    }


def windows_of_rank(micro_batches: int, device: torch.device | None = None) -> list[list[dict[str, Any]]]:
    """Four windows of this rank, on the host or a device; without masks, whose values transformers reads."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    drawn = [ragged_batches(micro_batches * ranks, seed=seed)[rank::ranks] for seed in range(4)]
    return [
        [{n: v.to(device or "cpu") for n, v in batch.items() if n != "attention_mask"} for batch in window]
        for window in drawn
    ]


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The whole tensor, on the CPU, where tests compare."""
    from torch.distributed.tensor import DTensor

    from fsdp_sft._tensors.boxes import memory_of, values_of

    if tensor is None:
        return None
    if isinstance(tensor, DTensor) and memory_of(tensor).dtype != tensor.dtype:  # packed
        like = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
        tensor = DTensor.from_local(
            values_of(tensor, torch.float32), tensor.device_mesh, tensor.placements, **like
        )
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def largest_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference relative to the largest entry of all expected tensors."""
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected) / scale


class AllFloat64(TorchFunctionMode):
    """While it is on, what would cast a float64 tensor to float32 leaves it as it is.

    Norms, softmaxes and routers of transformers compute in float32 whatever the model's dtype, which leaves
    differences of 1e-7 where two orders of the same sums are compared.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wide = args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if func is torch.Tensor.float:
            return args[0].double()  # positions and frequencies too, which are multiplied by each other
        if wide:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if v is torch.float32 else v for name, v in kwargs.items()}
        return func(*args, **kwargs)

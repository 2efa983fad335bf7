"""Tiny models of many families, and ragged batches."""

from typing import Any

import torch
import transformers as tf
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.overrides import TorchFunctionMode

from tests.plain import gradients as oracle_gradients, mean_loss as oracle_loss  # noqa: F401  by these names

FLOAT32 = MixedPrecisionPolicy()  # computes in the dtype of the parameters, where the default is bfloat16
VOCAB = 101  # not divisible by any number of ranks used here
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
"""Sizes of a decoder, but for its layers."""

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
"""The same with multi-head latent attention and small experts, as in DeepSeek-V3."""


def tiny_config(family: str, **overrides: Any) -> Any:
    common = {**TINY, "num_hidden_layers": 3}
    no_kv = {name: value for name, value in common.items() if name != "num_key_value_heads"}
    table = {
        "llama": lambda: tf.LlamaConfig(**{**common, **overrides}),
        "qwen2": lambda: tf.Qwen2Config(**{**common, "tie_word_embeddings": False, **overrides}),
        "qwen2-tied": lambda: tf.Qwen2Config(**{**common, "tie_word_embeddings": True, **overrides}),
        "qwen3": lambda: tf.Qwen3Config(**{**common, "head_dim": 8, **overrides}),
        "qwen3-tied": lambda: tf.Qwen3Config(
            **{**common, "head_dim": 8, "tie_word_embeddings": True, **overrides}
        ),
        "gemma2": lambda: tf.Gemma2Config(
            **{
                **common,
                "head_dim": 8,
                "final_logit_softcapping": 3.0,
                "tie_word_embeddings": False,
                **overrides,
            }
        ),
        "granite": lambda: tf.GraniteConfig(**{**common, "logits_scaling": 4.0, **overrides}),
        "cohere": lambda: tf.CohereConfig(**{**common, "logit_scale": 0.5, **overrides}),
        "gemma3": lambda: tf.Gemma3TextConfig(
            **{**common, "head_dim": 8, "sliding_window": 8, "layer_types": None, **overrides}
        ),
        "mixtral": lambda: tf.MixtralConfig(
            **{**common, "num_local_experts": 4, "num_experts_per_tok": 2, **overrides}
        ),
        "gpt2": lambda: tf.GPT2Config(
            **{
                "vocab_size": VOCAB,
                "n_embd": 32,
                "n_layer": 3,
                "n_head": 4,
                "n_positions": 128,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
                **overrides,
            }
        ),
        "t5": lambda: tf.T5Config(
            **{
                "vocab_size": VOCAB,
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 3,
                "num_heads": 4,
                "dropout_rate": 0.0,
                "decoder_start_token_id": 0,
                "pad_token_id": 0,
                **overrides,
            }
        ),
        "bert": lambda: tf.BertConfig(
            **{
                **no_kv,
                "num_labels": 3,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
                **overrides,
            }
        ),
    }
    return table[family]()


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    classes = {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen2-tied": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3-tied": "Qwen3ForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "granite": "GraniteForCausalLM",
        "cohere": "CohereForCausalLM",
        "gemma3": "Gemma3ForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "t5": "T5ForConditionalGeneration",
        "bert": "BertForSequenceClassification",
    }
    config = tiny_config(family, **overrides)
    torch.manual_seed(seed)
    model = getattr(tf, classes[family])(config)
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
    for index in range(count):
        lengths = [draw(4, longest) for _ in range(batch_size)]
        width = max(lengths)
        ids = torch.zeros(batch_size, width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        labels = torch.full_like(ids, -100)
        for row, length in enumerate(lengths):
            ids[row, :length] = torch.randint(3, VOCAB, (length,), generator=generator)
            mask[row, :length] = 1
            start = draw(1, length)
            labels[row, start:length] = ids[row, start:length]
        if count > 1 and index == count - 1:
            labels[:] = -100
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def windows_of_rank(micro_batches: int, device: torch.device | None = None) -> list[list[dict[str, Any]]]:
    """Four windows of this rank, on the host or a device; without masks, whose values transformers reads."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    drawn = [ragged_batches(micro_batches * ranks, seed=seed)[rank::ranks] for seed in range(4)]
    for window in drawn:
        for batch in window:
            del batch["attention_mask"]
            batch.update({name: value.to(device) for name, value in batch.items()} if device else {})
    return drawn


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

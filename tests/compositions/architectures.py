"""The plain models that are composed, by what is special about them."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

import fsdp_sft as fs
from tests.compositions.rows import VOCABULARY
from tests.harness.models import TINY, tiny_model
from tests.harness.quantised_folders import quantise
from tests.harness.quantised_weights import in_nf4, is_packed

EXTRA_TOKENS = 5
GROWN = VOCABULARY + EXTRA_TOKENS
ROUTER_COEFFICIENT = 0.5
TOWERS = ("vision_tower", "multi_modal_projector")


class Block(nn.Module):
    """A block of a model written by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.mlp(self.ln_2(x))


class ByHand(nn.Module):
    """A decoder in the manner of nanoGPT: all in one ModuleDict, ``forward(idx)``, logits alone."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, width),
                "h": nn.ModuleList(Block(width) for _ in range(depth)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def build(architecture: str, *, seed: int = 0) -> Any:
    """A plain model in float32 and ``train()`` mode, without dropout."""
    if architecture == "not of transformers":
        torch.manual_seed(seed)
        return ByHand().train()
    families: dict[str, tuple[str, dict[str, Any]]] = {
        "dense": ("llama", {}),
        "tied": ("qwen2-tied", {}),
        "moe": ("mixtral", {}),
        "moe with router loss": (
            "mixtral",
            {"output_router_logits": True, "router_aux_loss_coef": ROUTER_COEFFICIENT},
        ),
        "sliding window": ("gemma3", {}),
        "learned positions": ("gpt2", {"tie_word_embeddings": False}),
        # At 1 its first loss is twice that of guessing, and a rounding turns its gradients over.
        # Smooth, not T5's ReLU: a unit that rounding switches on or off is no rounding error.
        "encoder-decoder": ("t5", {"initializer_factor": 0.3, "feed_forward_proj": "gelu"}),
    }
    if architecture in families:
        family, overrides = families[architecture]
        return tiny_model(family, seed=seed, **overrides)
    common = {**TINY, "vocab_size": VOCABULARY, "num_hidden_layers": 3, "head_dim": 8}
    made = {
        "soft cap": lambda: tf.Gemma2ForCausalLM(
            tf.Gemma2Config(
                **common, sliding_window=8, final_logit_softcapping=5.0, tie_word_embeddings=False
            )
        ),
        "convolution": lambda: tf.Lfm2ForCausalLM(
            tf.Lfm2Config(
                **{key: value for key, value in common.items() if key != "head_dim"},
                layer_types=["conv", "full_attention", "conv"],
                tie_word_embeddings=False,
            )
        ),
        "float32 modules": lambda: tf.GptOssForCausalLM(
            tf.GptOssConfig(**common, num_local_experts=3, num_experts_per_tok=2, sliding_window=8)
        ),
        "vision and text": lambda: tf.LlavaForConditionalGeneration(
            tf.LlavaConfig(
                text_config={"model_type": "llama", **common},
                vision_config={
                    "model_type": "clip_vision_model",
                    "hidden_size": 16,
                    "intermediate_size": 24,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "image_size": 28,
                    "patch_size": 14,
                },
                image_token_index=2,
                tie_word_embeddings=False,
            )
        ),
    }
    torch.manual_seed(seed)
    model = made[architecture]()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3)
    return model.train()


def auto_class(architecture: str) -> Any:
    """What reads a Hugging Face folder of it back."""
    return {
        "encoder-decoder": tf.AutoModelForSeq2SeqLM,
        "vision and text": tf.AutoModelForImageTextToText,
    }.get(architecture, tf.AutoModelForCausalLM)


def read(folder: Path, architecture: str) -> Any:
    """A folder read back plainly, in float32 and ``train()`` mode."""
    if architecture == "not of transformers":
        model = build(architecture)
        model.load_state_dict(torch.load(folder / "model.pt"))
        return model
    if (values := _values_of(folder)).is_dir():  # transformers' own dequantisation rounds to 16 bits
        folder = values
    model = auto_class(architecture).from_pretrained(folder, dtype=torch.float32).train()
    if architecture == "vision and text":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in TOWERS))
    for parameter in model.parameters():
        # It maps the file, where tensors begin anywhere. A product with one row adds
        # up in another order there than in memory of its own, which every other way of training has.
        parameter.data = parameter.data.clone()
    return model


def _values_of(folder: Path) -> Path:
    """Where the values of a quantised folder lie, beside it."""
    return folder.with_name(f"{folder.name}-values")


def write(model: Any, folder: Path, stored: str, frozen: str) -> None:
    """A folder of the model, with weights as they are to be stored, and such that packing changes none."""
    folder.mkdir(parents=True)
    if isinstance(model, ByHand):
        torch.save(model.state_dict(), folder / "model.pt")
        return
    if frozen == "nf4":
        for name, weight in model.named_parameters():
            if is_packed(name, weight):
                weight.data = in_nf4(weight.data)
    model.to(torch.bfloat16 if stored == "bfloat16" else torch.float32).save_pretrained(folder)
    if stored == "fp8":
        shutil.copytree(folder, _values_of(folder))
        quantise(folder, _values_of(folder))
    if stored == "both names of a tie":
        (path,) = folder.glob("*.safetensors")
        tensors = load_file(path)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, path, metadata={"format": "pt"})


def summed_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """What a caller writes: the cross entropy of a batch, summed; of any of these models."""
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "name")}
    labels = batch["labels"]
    config = getattr(getattr(model, "module", model), "config", None)  # of DistributedDataParallel
    if config is None:
        logits = model(inputs["input_ids"])
    elif getattr(config, "is_encoder_decoder", False):
        shifted = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1].clamp(min=0)], 1)
        logits = model(**inputs, decoder_input_ids=shifted, use_cache=False).logits
    else:
        logits = model(**inputs).logits
    if not getattr(config, "is_encoder_decoder", False):
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def loss_of_tokens(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same made of the losses of tokens, by whose weights it is multiplied, if a batch has any."""
    losses = fs.token_losses(model, batch)
    weights = batch.get("loss_weights")
    summed = losses.sum() if weights is None else (losses * weights.to(losses)).sum()
    return summed, {"plain": losses.sum()}


def weight_of_tokens(batch: dict[str, Any]) -> float:
    """Sum of the weights of the targets of a batch."""
    counts = batch["labels"][:, 1:] != -100
    weights = batch.get("loss_weights")
    return float(counts.sum() if weights is None else (weights[:, 1:] * counts).sum())


def count(batch: dict[str, Any], architecture: str) -> int:
    """Targets of a batch, as ``summed_loss`` sums over them."""
    labels = batch["labels"]
    return int((labels if architecture == "encoder-decoder" else labels[:, 1:]).ne(-100).sum())

"""Models of families with various heads, and hidden states, for tests of the loss."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.models import FLOAT32, full, tiny_model


def loss_of_logits(hidden, weight, labels, bias=None, softcap=None, scale=None) -> torch.Tensor:
    logits = (hidden @ weight.T + (0 if bias is None else bias)) * (1 if scale is None else scale)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def summed_of_logits(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def draw_head(
    dtype: torch.dtype, *, rows: int = 131, width: int = 32, vocab: int = 301, ignored: float = 0.4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(vocab, width, generator=generator).to(dtype)
    bias = torch.randn(vocab, generator=generator).to(dtype)
    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = -100
    return hidden, weight, labels, bias


def leaves_of(*tensors: torch.Tensor | None, dtype: torch.dtype | None = None) -> list[Any]:
    return [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


class Largest(TorchDispatchMode):
    numel = 0  # of the largest tensor that is made inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, out.numel() if isinstance(out, torch.Tensor) else 0)
        return out


HEADS = ("llama", "qwen3-tied", "gemma2", "granite", "cohere")  # families that differ in it


def own_batches(batches: list[Any]) -> list[Any]:
    return batches[dist.get_rank() :: dist.get_world_size()]


def shard_by_heads(model: Any, *, own_group: bool = False, mesh_shape: Any = None, **options: Any) -> Any:
    mesh = mesh_here(**(mesh_shape or {}))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if own_group and head.weight is embedding.weight:  # one group of the two
        for modules in (*fs.find_blocks(model).values(), [embedding, head], model):
            fully_shard(modules, mesh=mesh, mp_policy=options.get("mp_policy", FLOAT32))
        return model
    blocks = {**fs.find_blocks(model), **({"lm_head": head} if own_group else {})}
    options = {"mp_policy": FLOAT32, "master_dtype": head.weight.dtype, **options}
    return fs.shard_model(model, mesh=mesh, blocks=blocks, **options)


def with_loss(model: Any, **options: Any) -> Any:
    """``model``, whose loss is computed so from here on."""
    fs.prepare_loss(model, **options)
    return model


def window_gradients(
    model: Any, mine: list[Any], *, impl: str = "", accumulate: str = "all"
) -> dict[str, torch.Tensor]:
    model.reshard()  # after a forward without a backward, zero_grad would miss the root's shards
    model.zero_grad()
    if impl:
        with_loss(model, impl=impl)
    targets = fs.count_targets(mine)
    for index, batch in enumerate(mine):
        with fs.gradient_sync(model, "all" if index == len(mine) - 1 else accumulate):
            fs.causal_lm_loss(model, batch, num_targets=targets).backward()
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


ADAPTERS: dict[str, dict[str, Any]] = {
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}
# peft's layers that compute more than one product, which get full logits.
ADDED: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "lm_head"]},
    "lora with dropout": {"target_modules": ["lm_head"], "lora_dropout": 0.3},
    "dora": {"target_modules": ["lm_head"], "use_dora": True},
    "trained tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [5, 9, 40]}},
    "trained tokens, tied": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9, 40]},
}


def adapted_model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    from peft import LoraConfig, get_peft_model

    model = tiny_model("qwen2-tied" if "tied" in kind else "llama", dtype=dtype)
    config = LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **(ADAPTERS | ADDED)[kind])
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)  # DoRA's magnitude and the copies are not what they were made of
    return model.to(dtype)


def signed(batch: dict[str, Any], seed: int = 0) -> torch.Tensor:
    """A weight of either sign for each token of a batch, float64 ``(B, S)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch["labels"].shape, generator=generator, dtype=torch.float64)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of a model, whole and on the CPU, which are then gone."""
    found = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found

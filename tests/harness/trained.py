"""A model with all that a checkpoint must hold, and the comparison of everything in it."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp_sft as fs
from tests.harness.device import device_here, mesh_here
from tests.harness.models import full, ragged_batches, tiny_model
from tests.harness.packs import assert_same as assert_same

HSDP = {"dp_replicate": 2}
DDP = {"dp_replicate": 2, "dp_shard": 1}
BATCHES = ragged_batches(9)[:8]
this_rank = torch.distributed.get_rank


class Extra(nn.Module):
    """A model around a model, with the buffers and parameters that language models seldom have."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config
        self.scale = nn.Parameter(torch.randn(5, 3))  # fewer rows than some meshes have ranks
        self.register_buffer("count", torch.tensor(int(torch.randint(1000, ()))))
        self.register_buffer("flags", torch.rand(7) > 0.5)
        self.register_buffer("mean", torch.randn(4, dtype=torch.float64))
        self.register_buffer("scratch", torch.randn(3), persistent=False)

    def get_decoder(self) -> nn.Module:
        return self.inner.get_decoder()

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


def make_model(
    seed: int, mesh_shape: dict[str, int] | None, *, family: str = "qwen2-tied", wrap: bool = True
) -> Any:
    inner = tiny_model(family, seed=seed, **({"attention_dropout": 0.1} if family != "gpt2" else {}))
    blocks = fs.find_blocks(inner)
    inner.get_input_embeddings().requires_grad_(family != "llama")  # llama: frozen embedding
    model: Any = Extra(inner) if wrap else inner
    if mesh_shape is None:
        model = model.to(device_here())
    else:
        mesh = mesh_here(**mesh_shape)
        fs.shard_model(model, mesh=mesh, blocks={f"inner.{k}" if wrap else k: b for k, b in blocks.items()})
    return model


def make_adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def train(model: nn.Module, optimizer: Any, first: int, count: int) -> list[float]:
    """Losses of some steps with an optimizer, or with several that have parts of the model."""
    losses, optimizers = [], optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    for on_host in BATCHES[first : first + count]:
        batch = {key: value.to(device_here()) for key, value in on_host.items()}
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), ignore_index=-100
        )
        if isinstance(model, Extra):
            loss = (
                loss
                + (full(model.scale) if not hasattr(model, "unshard") else model.scale).square().sum() * 0
            )
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter) * 0.1
        for one in optimizers:
            one.step()
            one.zero_grad()
        losses.append(loss.item())
    return losses


def everything(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, of: Any = full
) -> dict[str, Any]:
    """Everything that must come back, by name: full tensors on every rank, or what `of` makes of them."""
    from fsdp_sft._model.view import reshard

    reshard(model)
    state = {f"model/{n}": of(t).detach().clone() for n, t in model.state_dict(keep_vars=True).items()}
    if optimizer is None:
        return state
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}/{key}"] = of(value).detach().clone() if torch.is_tensor(value) else value
    for index, group in enumerate(optimizer.param_groups):
        state.update({f"group/{index}/{k}": v for k, v in group.items() if k != "params"})
    return state


@torch.no_grad()
def spread(model: Any) -> None:
    """Give adapters whose product is zero values of their own, the same at any number of ranks."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 10
            if isinstance(parameter, DTensor):
                values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
            parameter.copy_(values)

"""What both sides of a comparison are given: adapters, optimizers, schedulers, batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.compositions import rows as make
from tests.compositions.architectures import TOWERS
from tests.compositions.axes import Draw
from tests.compositions.rows import Row

STEPS = 4
BATCH_ROWS = 2
PACK_TOKENS = 24
SCALE = 128.0
HOOK_FACTOR = 1.25


def ranks_of(mesh: str) -> int:
    """How many ranks a mesh has."""
    return {"single": 1, "1": 1, "fsdp 3": 3, "hsdp 2x2": 4, "cp 2 fsdp 2": 4}.get(mesh, 2)


def parts(draw: Draw) -> list[tuple[int, int]]:
    """The first and last step of each run."""
    if draw["resume"] == "no":
        return [(1, STEPS)]
    return [(1, 1), (2, 2), (3, STEPS)] if draw["resume"] == "twice" else [(1, 2), (3, STEPS)]


def resumed_mesh(draw: Draw) -> str:
    """The mesh that training goes on with."""
    others = {
        "1": "fsdp 2",
        "fsdp 2": "fsdp 3",
        "fsdp 3": "1",
        "hsdp 2x2": "fsdp 2",
        "replicas 2": "fsdp 3",
        "cp 2": "fsdp 3",
        "cp 2 fsdp 2": "cp 2",
    }
    return others.get(draw["mesh"], draw["mesh"]) if draw["resume"] == "other ranks" else draw["mesh"]


def micro_batches(draw: Draw) -> int:
    """How many a window has."""
    return int(draw["accumulation"][0])


def collated(draw: Draw, rows: list[Row]) -> dict[str, torch.Tensor]:
    """A padded batch, for what the architecture learns."""
    return (make.of_answers if draw["architecture"] == "encoder-decoder" else make.padded)(rows)


def adapter_config(draw: Draw) -> Any:
    """A peft config, or None."""
    kind = draw["adapters"]
    if kind == "none":
        return None
    from peft import LoraConfig

    embedding = "wte" if draw["architecture"] == "learned positions" else "embed_tokens"
    more: dict[str, Any] = {
        "dora": {"use_dora": True},
        "lora and saved modules": {"modules_to_save": [embedding]},
        "lora and tokens": {"trainable_token_indices": {embedding: [5, 53, 60]}},
    }.get(kind, {})
    if draw["architecture"] == "vision and text":
        more["exclude_modules"] = rf".*({'|'.join(TOWERS)}).*"
    return LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        **more,
    )


def optimizers(draw: Draw, model: nn.Module, rounded: Any = None) -> list[torch.optim.Optimizer]:
    """Over what a model trains; smooth, so that what is off by rounding stays so.

    ``rounded`` is the library's AdamW, which in float32 does what torch's does; None takes that.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kind = draw["optimizer"]
    if kind == "sgd":
        return [torch.optim.SGD(named.values(), lr=0.02, momentum=0.9)]
    options: dict[str, Any] = {"lr": 5e-3, "eps": 1e-2, "weight_decay": 0.1}
    if kind == "muon and adamw":
        # Not a router's gate: its gradient has a direction of 0 (the sum over experts), in which Muon, that
        # gives every direction the same size, makes steps of nothing but rounding.
        within = {n: p for n, p in named.items() if p.ndim == 2 and not n.endswith("mlp.gate.weight")}
        inner = {n: p for n, p in within.items() if "layers." in n or ".h." in n}
        rest = [p for n, p in named.items() if n not in inner]
        made = [torch.optim.Muon(inner.values(), lr=5e-3, momentum=0.9)] if inner else []
        return [*made, torch.optim.AdamW(rest, **options)] if rest else made
    if kind == "stochastic adamw" and rounded is not None:
        return [rounded(named.values(), **options)]
    return [torch.optim.AdamW(named.values(), **options)]


def kept_name(draw: Draw) -> str:
    """A submodule of blocks whose product is kept when the rest is recomputed."""
    return {
        "learned positions": "c_attn",
        "convolution": "w2",
        "encoder-decoder": "wi",
        "not of transformers": "qkv",
    }.get(draw["architecture"], "o_proj")


def max_norm(draw: Draw) -> float | None:
    """Where gradients are clipped."""
    return None if draw["clip"] == "none" else float(draw["clip"])


def twist(draw: Draw, model: Any) -> None:
    """Something of the caller's own on the model."""
    if draw["twist"] == "hook on the head":
        model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, out: out * HOOK_FACTOR)


def loss_terms(draw: Draw) -> dict[str, float]:
    """What the loss has beside the cross entropy."""
    return {"label_smoothing": 0.1, "z_loss": 0.01} if draw["loss terms"] == "smoothing and z-loss" else {}


def block_of(model: nn.Module, index: int) -> nn.Module:
    """A block of the model's (first) trunk of text."""
    trunks = (
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and not any(tower in name for tower in TOWERS)
    )
    return next(trunks)[index]


def change(draw: Draw, step: int, made: Sequence[torch.optim.Optimizer], *models: nn.Module) -> None:
    """What a caller changes before a step, the same beside either training.

    Made again after a resume, it comes to the same. Only the last model's forward runs.
    """
    what = draw[f"before step {step}"]
    if what == "another rate":
        for group in (group for one in made for group in one.param_groups):
            group["lr"] = 1e-3 * step
    if what == "a hook on a block":
        block_of(models[-1], -1).register_forward_hook(_scaled)
    for model in models if what == "freeze or thaw a block" else ():
        switch(block_of(model, 0))


def switch(block: nn.Module) -> None:
    """Freeze what is trained of a block, or train it again: what has been trained is known by a mark."""
    for parameter in block.parameters():
        if parameter.requires_grad or getattr(parameter, "is_frozen_now", False):
            parameter.is_frozen_now = parameter.requires_grad  # type: ignore[attr-defined]
            parameter.requires_grad_(not parameter.requires_grad)


def _scaled(module: nn.Module, args: Any, output: Any) -> Any:
    return (0.9 * output[0], *output[1:]) if isinstance(output, tuple) else 0.9 * output

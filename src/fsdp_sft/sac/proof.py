"""Detect a chosen block that does not run through its checkpoint: a part of it runs outside of any."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_sft.errors import UnsupportedModelError

_PROOF = "_fsdp_sft_sac_proof"  # attribute of a block: its _Proof
# One entry for each checkpoint that runs now in any thread: a block may run its parts in several.
_RUNNING: set[object] = set()


class _Proof:
    """Hooks on a block's parts, removed as soon as one has run inside of a checkpoint; opaque to Dynamo."""

    def __init__(self, block: str) -> None:
        self.block = block
        self.handles: list[Any] = []

    def end(self) -> None:
        """Remove all hooks."""
        while self.handles:
            self.handles.pop().remove()


def require_checkpoint(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Make the first training forward of each block's parts raise unless it runs inside of a checkpoint.

    A block that a forward leaves out (layer drop, a vision tower on text) is checked when it first runs. Only
    parts with a matrix are watched, because models may call a norm or a rotary embedding of a block from
    elsewhere; parts that also lie outside of the block are not watched. Compiled code is not checked.
    """
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for fqn, block in blocks.items():
        proof = _Proof(f"{fqn} ({type(block).__name__})")
        for name, part in block.named_modules():
            if name and places[id(part)] == places[id(block)] and has_matrix(part):
                hook = functools.partial(_before_part, proof, name)
                proof.handles.append(part.register_forward_pre_hook(hook))
        block.__dict__[_PROOF] = proof


def has_matrix(module: nn.Module) -> bool:
    """Whether a module has a parameter of two or more dimensions."""
    return any(parameter.ndim > 1 for parameter in module.parameters())


def drop_proof(block: nn.Module) -> None:
    """Remove the hooks of ``require_checkpoint`` from a block, if it has any."""
    proof = block.__dict__.pop(_PROOF, None)
    if proof is not None:
        proof.end()


def checkpoint_seen(
    recompute: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``recompute(function, ...)``, counted as a running checkpoint while ``function`` runs."""
    return recompute(functools.partial(_run_inside, function), *args, **kwargs)


def _run_inside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, counted as a running checkpoint."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    running = object()
    _RUNNING.add(running)
    try:
        return function(*args, **kwargs)
    finally:
        _RUNNING.discard(running)


def _before_part(proof: _Proof, name: str, part: nn.Module, args: Any) -> None:
    """Hook before a part's forward: ends the proof inside of a checkpoint, and raises outside."""
    if torch.compiler.is_compiling() or not (part.training and torch.is_grad_enabled()):
        return
    if _RUNNING:
        proof.end()
    else:
        raise UnsupportedModelError(
            f"{proof.block} was chosen by apply_sac, but its part {name!r} runs outside of its "
            "checkpoint, so nothing would be recomputed. If the model calls the block's parts instead of the "
            "block, choose what it calls with blocks=[...]; if something has changed the block's forward or "
            "checkpointing since, as gradient_checkpointing_enable() does, leave it out or call apply_sac "
            "after it"
        )

"""Notice a chosen block that does not run through its checkpoint, when a part of it first runs outside."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_sft.errors import NotRecomputedError

_PROOF = "_fsdp_sft_sac_proof"  # on a block
_CHECK = "_fsdp_sft_sac_check"  # on the model


class _Running:
    """How many checkpoints are running in any thread: a block may hand its parts to threads of its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0

    def add(self, number: int) -> None:
        with self.lock:
            self.count += number


_RUNNING = _Running()


class _Proof:
    """Hooks on a block's parts, which stay until one of them has run inside of a checkpoint."""

    def __init__(self, fqn: str, block: nn.Module, caller: str) -> None:
        self.block = f"{fqn} ({type(block).__name__})"
        self.caller = caller
        self.handles: list[Any] = []

    def watch(self, part: nn.Module, name: str) -> None:
        hook = functools.partial(_before_part, self, name)
        self.handles.append(part.register_forward_pre_hook(hook))

    def end(self) -> None:
        while self.handles:
            self.handles.pop().remove()


def check_before_forward(
    model: nn.Module, check: Callable[[nn.Module, dict[str, nn.Module]], None], blocks: dict[str, nn.Module]
) -> None:
    """Call ``check(model, blocks)`` once, when the model's next forward begins."""
    drop_check(model)
    hook = functools.partial(_check_once, check, tuple(blocks))
    model.__dict__[_CHECK] = model.register_forward_pre_hook(hook)


def drop_check(model: nn.Module) -> None:
    """Take ``check_before_forward`` back, if it has not come to that."""
    handle = model.__dict__.pop(_CHECK, None)
    if handle is not None:
        handle.remove()


def _check_once(check: Callable[..., None], names: tuple[str, ...], model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    check(model, {name: model.get_submodule(name) for name in names})
    drop_check(model)


def demand_proof(model: nn.Module, blocks: dict[str, nn.Module], caller: str) -> None:
    """Let the first training forward of a block's parts raise unless it is inside of a checkpoint.

    A block that a forward leaves out (layer drop, a vision tower on text) is looked at when it runs. Only
    parts with a matrix are watched, as models may call a norm or a rotary embedding from elsewhere, and none
    that lies outside of the block as well. Compiled code is not looked at.
    """
    places: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        places[id(module)] = places.get(id(module), 0) + 1
    for fqn, block in blocks.items():
        proof = _Proof(fqn, block, caller)
        for name, part in block.named_modules():
            own = places[id(part)] == places[id(block)]
            if name and own and any(parameter.ndim > 1 for parameter in part.parameters()):
                proof.watch(part, name)
        block.__dict__[_PROOF] = proof


def drop_proof(block: nn.Module) -> None:
    """Take the hooks of ``demand_proof`` off a block, if there are any."""
    proof = block.__dict__.pop(_PROOF, None)
    if proof is not None:
        proof.end()


def checkpoint_seen(
    recompute: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``recompute(function, ...)``, seen by the hooks of the parts that run meanwhile."""
    return recompute(functools.partial(_run_inside, function), *args, **kwargs)


def _run_inside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    _RUNNING.add(1)
    try:
        return function(*args, **kwargs)
    finally:
        _RUNNING.add(-1)


def _before_part(proof: _Proof, name: str, part: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not (part.training and torch.is_grad_enabled()):
        return
    if _RUNNING.count:
        proof.end()
    else:
        raise NotRecomputedError(
            f"{proof.block} was chosen by {proof.caller}, but its part {name!r} runs outside of its "
            "checkpoint, so nothing would be recomputed. If the model calls the block's parts instead of the "
            "block, choose what it calls with blocks=[...]; if something has replaced the block's forward or "
            f"turned its checkpointing off since, call {proof.caller} after that"
        )

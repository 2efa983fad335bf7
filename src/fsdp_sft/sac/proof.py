"""Detect a chosen block that does not run through its checkpoint: a part of it runs outside of any."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_sft.errors import UnsupportedModelError

_PROOF = "_fsdp_sft_sac_proof"  # attribute of a block: its _Proof
_CHECK = "_fsdp_sft_sac_check"  # attribute of the model: hook of check_before_forward, and its handle


class _Running:
    """Number of checkpoints that run now in any thread: a block may run its parts in several."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0

    def add(self, number: int) -> None:
        """Change the count by ``number``."""
        with self.lock:
            self.count += number


_RUNNING = _Running()


class _Proof:
    """Hooks on a block's parts, which are removed as soon as one part has run inside of a checkpoint."""

    def __init__(self, fqn: str, block: nn.Module, caller: str) -> None:
        self.block = f"{fqn} ({type(block).__name__})"
        self.caller = caller
        self.handles: list[Any] = []

    def watch(self, part: nn.Module, name: str) -> None:
        """Put a hook on a part."""
        hook = functools.partial(_before_part, self, name)
        self.handles.append(part.register_forward_pre_hook(hook))

    def end(self) -> None:
        """Remove all hooks."""
        while self.handles:
            self.handles.pop().remove()


def check_before_forward(
    model: nn.Module, check: Callable[[nn.Module, dict[str, nn.Module]], None], blocks: dict[str, nn.Module]
) -> None:
    """Call ``check(model, blocks)`` once, when the model's next forward begins."""
    drop_check(model)
    hook = functools.partial(_check_once, check, tuple(blocks))
    model.__dict__[_CHECK] = hook, model.register_forward_pre_hook(hook)


def check_now(model: nn.Module) -> None:
    """Run the check of ``check_before_forward`` now, after sharding, if it has not run yet."""
    hook, _ = model.__dict__.get(_CHECK, (None, None))
    if hook is not None:
        hook(model, ())


def drop_check(model: nn.Module) -> None:
    """Undo ``check_before_forward`` if its check has not run yet."""
    _, handle = model.__dict__.pop(_CHECK, (None, None))
    if handle is not None:
        handle.remove()


def _check_once(check: Callable[..., None], names: tuple[str, ...], model: nn.Module, args: Any) -> None:
    """Hook before the model's forward: runs the check and removes itself."""
    if torch.compiler.is_compiling():
        return
    check(model, {name: model.get_submodule(name) for name in names})
    drop_check(model)


def require_checkpoint(model: nn.Module, blocks: dict[str, nn.Module], caller: str) -> None:
    """Make the first training forward of each block's parts raise unless it runs inside of a checkpoint.

    A block that a forward leaves out (layer drop, a vision tower on text) is checked when it first runs. Only
    parts with a matrix are watched, because models may call a norm or a rotary embedding of a block from
    elsewhere; parts that also lie outside of the block are not watched. Compiled code is not checked.
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
    _RUNNING.add(1)
    try:
        return function(*args, **kwargs)
    finally:
        _RUNNING.add(-1)


def _before_part(proof: _Proof, name: str, part: nn.Module, args: Any) -> None:
    """Hook before a part's forward: ends the proof inside of a checkpoint, and raises outside."""
    if torch.compiler.is_compiling() or not (part.training and torch.is_grad_enabled()):
        return
    if _RUNNING.count:
        proof.end()
    else:
        raise UnsupportedModelError(
            f"{proof.block} was chosen by {proof.caller}, but its part {name!r} runs outside of its "
            "checkpoint, so nothing would be recomputed. If the model calls the block's parts instead of the "
            "block, choose what it calls with blocks=[...]; if something has replaced the block's forward or "
            f"turned its checkpointing off since, call {proof.caller} after that"
        )

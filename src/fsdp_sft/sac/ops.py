"""Recompute blocks except for the costly operations of named submodules, whose outputs are kept."""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_sft._compat.compile import (
    being_compiled,
    changes_its_inputs,
    draws_random_numbers_now,
    modules_being_traced,
)
from fsdp_sft.errors import UnsupportedModelError, abridged
from fsdp_sft.sac.attach import override
from fsdp_sft.sac.decisions import decides, is_decision, keep_decisions

SDPA = "sdpa"  # name in ``save`` of the fused attention kernels, which lie between submodules

# Costly operations of torch: matrix products, convolutions and fused attention. An operation that a library
# has registered (grouped experts, scans) counts as costly too; see _is_costly.
_COSTLY = re.compile(r"aten::_?\w*(mm|attention\w*|convolution\w*)")
_ATTENTION = re.compile(r".*(attention|attn).*")
_RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE
_NOT_A_KERNEL = {"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp"}


def refuse_inner_groups(model: nn.Module, blocks: list[str]) -> None:
    """Refuse blocks, by their FQNs, with FSDP2 groups inside of them."""
    for fqn in blocks:
        within = model.get_submodule(fqn).named_modules()
        inner = [name for name, module in within if name and isinstance(module, FSDPModule)]
        if inner:
            # Selective checkpointing matches operations by counting those of each kind. Gathering a group
            # adds some, but not in a recomputation that finds it gathered already.
            raise UnsupportedModelError(
                f"{abridged(f'{fqn}.{name}' for name in inner)} is sharded as a group of its own (experts "
                "that ranks share out by ep_size), and save= cannot tell what gathers it from what the block "
                "computes; call apply_sac without save=, or leave these blocks out with blocks="
            )


def checkpoint_keeping(
    blocks: dict[str, nn.Module], names: tuple[str, ...], options: dict[str, Any]
) -> Callable[..., Any]:
    """A ``torch.utils.checkpoint.checkpoint`` that keeps the costly outputs of the named submodules."""
    inside = _Inside(options["preserve_rng_state"])
    for module in kept_modules(blocks, names):
        plain = module.__dict__.get("forward")
        override(module, forward=functools.partial(_forward_inside, module, inside, plain))
    policy = functools.partial(_policy, inside, names)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    if any(map(decides, blocks.values())):
        contexts = functools.partial(keep_decisions, contexts)
    return functools.partial(checkpoint, context_fn=contexts, **options)


class _Inside:
    """Number of named submodules that the eager forward is in now.

    ``is_random`` says whether random numbers of the forward are repeated in the recomputation.
    """

    def __init__(self, is_random: bool) -> None:
        self.depth = 0
        self.is_random = is_random


def _forward_inside(self: nn.Module, inside: _Inside, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward of a named submodule, counted while it runs."""
    forward = plain if plain is not None else functools.partial(type(self).forward, self)
    if torch.compiler.is_compiling():  # there modules_being_traced tells where an operation lies
        return forward(*args, **kwargs)
    inside.depth += 1
    try:
        return forward(*args, **kwargs)
    finally:
        inside.depth -= 1


def _policy(
    inside: _Inside, names: tuple[str, ...], context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Whether torch's selective checkpointing saves the output of an operation or recomputes it."""
    is_kept = SDPA in names and _ATTENTION.fullmatch(op.name()) is not None
    if not is_kept and _is_costly(op):
        is_kept = inside.depth > 0 or any(_ends_with(path, names) for path in modules_being_traced())
    # In eager mode a decision cannot be saved, because models change its values in place; with_decisions
    # keeps the indices there. Compiled code has no changes in place.
    if is_decision(op, args):
        return CheckpointPolicy.MUST_SAVE if being_compiled() else _RECOMPUTE
    # A kernel that draws random numbers has to run again, or later ones would draw other numbers.
    if is_kept and not (inside.is_random and draws_random_numbers_now(op, args, kwargs)):
        return CheckpointPolicy.MUST_SAVE
    return _RECOMPUTE


def _is_costly(op: Any) -> bool:
    """Whether an operation is costly: one of torch's in ``_COSTLY``, or a library's that changes no input."""
    if op.namespace in _NOT_A_KERNEL:
        return _COSTLY.fullmatch(op.name()) is not None
    return not changes_its_inputs(op)


def _ends_with(path: str, names: tuple[str, ...]) -> bool:
    """Whether the last components of a module's path are one of ``names``."""
    return any(path == name or path.endswith(f".{name}") for name in names)


def kept_modules(blocks: dict[str, nn.Module], names: tuple[str, ...]) -> list[nn.Module]:
    """Submodules that ``names`` stand for, each once.

    Raises:
        ValueError: For a name that none of them has.
    """
    named = [item for block in blocks.values() for item in block.named_modules() if item[0]]
    kept: dict[int, nn.Module] = {}
    for name in names:
        matching = [module for path, module in named if _ends_with(path, (name,))]
        if not matching and name != SDPA:
            raise ValueError(
                f"no submodule of these blocks is called {name!r}; they have {_nameable(blocks)}"
            )
        kept.update((id(module), module) for module in matching)
    return list(kept.values())


def _nameable(blocks: dict[str, nn.Module], most: int = 16) -> list[str]:
    """Names that ``save`` takes, without the indices of experts."""
    named = (item for block in blocks.values() for item in block.named_modules() if item[0])
    names = (name for name, module in named if any(p.ndim > 1 for p in module.parameters()))
    return list(dict.fromkeys(name for name in names if not re.search(r"(^|\.)\d+(\.|$)", name)))[:most]

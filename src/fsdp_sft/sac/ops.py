"""Recompute blocks except for the costly operations of named submodules, whose outputs are kept."""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_sft._compat.compile import changes_its_inputs, draws_random_numbers_now, modules_being_traced
from fsdp_sft.errors import UnsupportedModelError, abridged
from fsdp_sft.sac.attach import run_around
from fsdp_sft.sac.decisions import checkpoint_of

SDPA = "sdpa"  # name in ``save`` of the fused attention kernels, which lie between submodules

# Costly operations of torch: matrix products, convolutions and fused attention. An operation that a library
# has registered (grouped experts, scans) counts as costly too; see _is_costly.
_COSTLY = re.compile(r"aten::_?\w*(mm|attention\w*|convolution\w*)")
_ATTENTION = re.compile(r".*(attention|attn).*")
_NOT_A_KERNEL = {"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp"}


def refuse_inner_groups(model: nn.Module, blocks: list[str]) -> None:
    """Refuse blocks, by their FQNs, with FSDP2 groups inside of them."""
    for fqn in blocks:
        inner = [n for n, m in model.get_submodule(fqn).named_modules() if n and isinstance(m, FSDPModule)]
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
    named = _Named(names)
    for module in kept_modules(blocks, names):
        run_around(module, named.run)
    return checkpoint_of(
        blocks, options, functools.partial(_policy, named, SDPA in names, options["preserve_rng_state"])
    )


class _Named:
    """Modules by the last components of their FQNs, and whether one of them is running."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.endings = tuple(f".{name}" for name in names)
        self.depth = 0  # of their eager calls that run now

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the forward of one of them."""
        if torch.compiler.is_compiling():  # there modules_being_traced tells where an operation lies
            return forward(*args, **kwargs)
        self.depth += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self.depth -= 1

    def are_running(self) -> bool:
        """Whether the operation that runs, or is being compiled, lies within one of them."""
        return self.depth > 0 or any(f".{path}".endswith(self.endings) for path in modules_being_traced())


def _policy(
    named: _Named, sdpa: bool, is_random: bool, context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Whether torch's selective checkpointing saves the output of an operation or recomputes it.

    Args:
        named: The submodules whose costly outputs are kept.
        sdpa: Whether those of attention kernels are kept.
        is_random: Whether random numbers of the forward are repeated in the recomputation.
        context: torch's.
        op: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    is_kept = (sdpa and _ATTENTION.fullmatch(op.name())) or (_is_costly(op) and named.are_running())
    # A kernel that draws random numbers has to run again, or later ones would draw other numbers.
    if is_kept and not (is_random and draws_random_numbers_now(op, args, kwargs)):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _is_costly(op: Any) -> bool:
    """Whether an operation is costly: one of torch's in ``_COSTLY``, or a library's that changes no input."""
    if op.namespace in _NOT_A_KERNEL:
        return _COSTLY.fullmatch(op.name()) is not None
    return not changes_its_inputs(op)


def kept_modules(blocks: dict[str, nn.Module], names: tuple[str, ...]) -> list[nn.Module]:
    """Submodules that ``names`` stand for, each once.

    Raises:
        ValueError: For a name that none of them has.
    """
    named = [item for block in blocks.values() for item in block.named_modules() if item[0]]
    kept: dict[int, nn.Module] = {}
    for name in names:
        matching = [module for path, module in named if f".{path}".endswith(f".{name}")]
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

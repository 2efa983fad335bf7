"""Refuse FSDP2 groups inside of a block for ``apply_sac(save=)``, whenever they were made."""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_sft.errors import UnsupportedModelError, abridged

_CHECK = "_fsdp_sft_sac_check"  # attribute of the model: hook of check_before_forward, and its handle


def check_before_forward(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Check once more, when the model's next forward begins, that no block has FSDP2 groups inside."""
    hook = functools.partial(_check_once, tuple(blocks))
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


def _check_once(names: tuple[str, ...], model: nn.Module, args: Any) -> None:
    """Hook before the model's forward: runs the check and removes itself."""
    if torch.compiler.is_compiling():
        return
    refuse_inner_groups({name: model.get_submodule(name) for name in names})
    drop_check(model)


def refuse_inner_groups(blocks: dict[str, nn.Module]) -> None:
    """Refuse blocks with FSDP2 groups inside of them."""
    for fqn, block in blocks.items():
        inner = [name for name, module in block.named_modules() if name and isinstance(module, FSDPModule)]
        if inner:
            # Selective checkpointing matches operations by counting those of each kind. Gathering a group
            # adds some, but not in a recomputation that finds it gathered already.
            raise UnsupportedModelError(
                f"{abridged(f'{fqn}.{name}' for name in inner)} is sharded as a group of its own (experts "
                "that ranks share out by ep_size, or a module kept in float32), and save= cannot tell what "
                "gathers it from what the block computes; call apply_sac without save=, or leave "
                "these blocks out with blocks="
            )

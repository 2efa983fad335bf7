"""Attach a checkpoint function to a block without renaming any parameter, and remove it again."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.checkpointing import checkpointing_flag, is_checkpointing_layer
from fsdp_sft._model.blocks import CACHES_OFF, configs_of
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.sac.groups import drop_check
from fsdp_sft.sac.offload import Offload, run_offloaded

_STATE = "_fsdp_sft_sac"  # attribute of a module: the instance attributes that were replaced
_CACHE_CHECK = "_fsdp_sft_sac_cache_check"  # attribute of the model: handle of the hook that refuses caches
_ABSENT = "absent"
OFFLOADED = "_fsdp_sft_offloaded"  # attribute of a block whose inputs wait on the host
COMPILED = "{!r} is compiled, and offload=True is for blocks that are not: leave out one of the two"


def checkpoint_blocks(
    blocks: dict[str, nn.Module], recompute: Callable[..., Any], offload: Offload | None
) -> None:
    """Run the blocks' training forwards through ``recompute``."""
    if offload is not None:
        recompute = functools.partial(run_offloaded, offload, recompute)
    for block in blocks.values():
        if offload is not None:
            override(block, **{OFFLOADED: True})
        _checkpoint_block(block, recompute)


def _checkpoint_block(block: nn.Module, recompute: Callable[..., Any]) -> None:
    """Use transformers' own checkpointing flag where the block has one, else replace its forward."""
    if is_checkpointing_layer(block):
        override(block, **checkpointing_flag(recompute))
        return
    plain = block.__dict__.get("forward")  # a forward that someone set on the instance stays the inner one
    # A partial of a plain function survives deepcopy and pickling, unlike a closure or a method.
    forward = functools.partial(_forward_with_checkpointing, block)
    override(block, forward=forward, _fsdp_sft_recompute=(recompute, plain))


def override(module: nn.Module, **attributes: Any) -> None:
    """Set instance attributes of a module and remember the ones that they replace."""
    replaced = module.__dict__.setdefault(_STATE, {})
    for name in attributes:
        replaced.setdefault(name, module.__dict__.get(name, _ABSENT))
    module.__dict__.update(attributes)


def restore(model: nn.Module) -> None:
    """Undo everything that ``override`` has set in a model, and turn generation caches on again."""
    for module in model.modules():
        drop_check(module)
        for name, value in module.__dict__.pop(_STATE, {}).items():
            if isinstance(value, str) and value == _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value
    for config in model.__dict__.pop(CACHES_OFF, ()):
        config.use_cache = True
    handle = model.__dict__.pop(_CACHE_CHECK, None)
    if handle is not None:
        handle.remove()


def disable_caches(model: nn.Module) -> None:
    """Turn ``use_cache`` off in all configs of the model that have it on; ``restore`` turns it on again."""
    on = [config for config in configs_of(model) if getattr(config, "use_cache", False)]
    for config in on:
        config.use_cache = False
    model.__dict__[CACHES_OFF] = on
    model.__dict__[_CACHE_CHECK] = model.register_forward_pre_hook(_refuse_generation, with_kwargs=True)


def _refuse_generation(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: refuse a cache in train() mode, where checkpointed blocks drop it and others do not.

    With gradients enabled the cache of a forward is empty, and nothing is lost with it.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return
    # transformers 5.24 has renamed the argument.
    if model.training and any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):
        raise UnsupportedModelError(
            "the model is in train() mode, in which its checkpointed blocks drop the cache of generate, and "
            "its text would be wrong: call model.eval() before, and model.train() after"
        )


def refuse_foreign_checkpointing(model: nn.Module) -> None:
    """Raise if transformers' own gradient checkpointing is on."""
    for fqn, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"{fqn or 'the model'} is checkpointed by transformers already, which would recompute blocks "
                "that were not chosen; call model.gradient_checkpointing_disable() before apply_sac"
            )


def _forward_with_checkpointing(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of a checkpointed block: recomputed in training with gradients, else the plain one."""
    recompute, plain = self.__dict__["_fsdp_sft_recompute"]
    forward = plain if plain is not None else functools.partial(type(self).forward, self)
    if self.training and torch.is_grad_enabled():
        # Bound to the function, as in transformers: Dynamo of torch 2.11 looks at the arguments of torch's
        # checkpoint, and hands the call to a RowMask among them, which it then traces without end.
        return recompute(functools.partial(forward, **kwargs), *args)
    return forward(*args, **kwargs)

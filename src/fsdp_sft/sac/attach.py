"""Attach a checkpoint function to a block without renaming any parameter, and remove it again."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.compile import checkpointing_flag
from fsdp_sft._model.blocks import configs_of
from fsdp_sft._model.view import is_a
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.sac.offload import Offload, run_offloaded

_SAC = "_fsdp_sft_sac"  # attribute of a module that apply_sac has changed; copied and pickled with it
_ABSENT = "absent"


@dataclass
class Checkpointed:
    """What ``apply_sac`` has changed in a module.

    Attributes:
        replaced: The module's own attributes that were replaced.
        is_offloaded: Whether it is a block whose inputs wait on the host.
        caches: Of the model: configs whose ``use_cache`` was turned off.
        hook: Of the model: handle of the hook that refuses caches.
        kept: Of the model: FQNs of the blocks that keep some of their outputs.
    """

    replaced: dict[str, Any] = field(default_factory=dict)
    is_offloaded: bool = False
    caches: list[Any] = field(default_factory=list)
    hook: Any = None
    kept: list[str] = field(default_factory=list)


def checkpointed(module: nn.Module) -> Checkpointed:
    """What ``apply_sac`` has changed in a module; an empty one if it has changed nothing."""
    return module.__dict__.get(_SAC) or Checkpointed()


def configs_without_caches(model: nn.Module) -> list[Any]:
    """Configs of a model whose ``use_cache`` is off only because of activation checkpointing."""
    return [config for module in model.modules() for config in checkpointed(module).caches]


def checkpoint_blocks(
    blocks: dict[str, nn.Module], recompute: Callable[..., Any], offload: Offload | None
) -> None:
    """Run the blocks' training forwards through ``recompute``."""
    if offload is not None:
        recompute = functools.partial(run_offloaded, offload, recompute)
    for block in blocks.values():
        if is_a(block, "GradientCheckpointingLayer", "transformers"):
            override(block, **checkpointing_flag(recompute))
        else:
            run_around(block, functools.partial(_checkpointed_in_training, block, recompute))
        checkpointed(block).is_offloaded = offload is not None


def run_around(module: nn.Module, around: Callable[..., Any]) -> None:
    """Replace a module's forward by ``around(forward, *args, **kwargs)``.

    A forward that was set on the instance stays the inner one.
    """
    # A partial of a plain function survives deepcopy and pickling, unlike a closure or the module's method.
    plain = module.__dict__.get("forward")
    override(module, forward=functools.partial(_run_around, module, around, plain))


def _run_around(self: nn.Module, around: Callable[..., Any], plain: Any, *args: Any, **kwargs: Any) -> Any:
    forward = plain if plain is not None else functools.partial(type(self).forward, self)
    return around(forward, *args, **kwargs)


def override(module: nn.Module, **attributes: Any) -> None:
    """Set instance attributes of a module and remember the ones that they replace."""
    replaced = module.__dict__.setdefault(_SAC, Checkpointed()).replaced
    for name in attributes:
        replaced.setdefault(name, module.__dict__.get(name, _ABSENT))
    module.__dict__.update(attributes)


def remove_sac(model: nn.Module) -> None:
    """Undo ``apply_sac``; a model without it is left as it is.

    Args:
        model: Model that was given to ``apply_sac``.

    Example:
        >>> fs.apply_sac(model, blocks=[0, -1])
        ['model.layers.0', 'model.layers.3']
        >>> fs.remove_sac(model)
    """
    for module in model.modules():
        done = checkpointed(module)
        module.__dict__.pop(_SAC, None)
        for name, value in done.replaced.items():
            if isinstance(value, str) and value == _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value
        for config in done.caches:
            config.use_cache = True
        if done.hook is not None:
            done.hook.remove()


def note_model(model: nn.Module, kept: list[str]) -> None:
    """Turn ``use_cache`` off in all configs that have it on, and note the blocks that keep some outputs."""
    on = [config for config in configs_of(model) if getattr(config, "use_cache", False)]
    for config in on:
        config.use_cache = False
    hook = model.register_forward_pre_hook(_refuse_generation, with_kwargs=True)
    done = model.__dict__.setdefault(_SAC, Checkpointed())
    done.caches, done.hook, done.kept = on, hook, kept


def _refuse_generation(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: refuse a cache in train() mode, where checkpointed blocks drop it and others do not.

    With gradients enabled the cache of a forward is empty, and nothing is lost with it.
    """
    if torch.is_grad_enabled():
        return
    # transformers 5.24 has renamed the argument.
    if model.training and any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):
        raise UnsupportedModelError(
            "the model is in train() mode, in which its checkpointed blocks drop the cache of generate, and "
            "its text would be wrong: call model.eval() before, and model.train() after"
        )


def _checkpointed_in_training(
    block: nn.Module, recompute: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a checkpointed block's forward: it is recomputed in training with gradients."""
    if block.training and torch.is_grad_enabled():
        # Bound to the function, as in transformers: Dynamo looks at the arguments of torch's checkpoint, and
        # hands the call to a RowMask among them, which it then traces without end.
        return recompute(functools.partial(forward, **kwargs), *args)
    return forward(*args, **kwargs)

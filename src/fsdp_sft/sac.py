"""Selective activation checkpointing: recompute a chosen fraction of the blocks in the backward."""

import functools
import math
import re
from collections.abc import Callable
from fractions import Fraction
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_sft.blocks import find_blocks

Ratio = float | str | Fraction
Placement = Literal["even", "prefix"]

_PLACEMENTS = ("even", "prefix")
_RATIO_TEXT = re.compile(r"\d+(\.\d+)?(\s*/\s*\d+(\.\d+)?)?")
_STATE = "_fsdp_sft_sac"  # on a block: the instance attributes that apply_sac replaced
_CACHE_WAS_ON = "_fsdp_sft_cache_was_on"
_ABSENT = "absent"


def parse_ratio(ratio: Ratio) -> Fraction:
    """The exact ratio behind a number or a text such as ``"1/3"``.

    Args:
        ratio: A float is taken as the nearest fraction with a denominator up to 1000, because 0.7 as it is
            stored is a little less than 7/10 and would pick 31 of 45 blocks instead of 32.

    Raises:
        TypeError: If it is no number or text.
        ValueError: If it cannot be read or lies outside [0, 1].
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float, str, Fraction)):
        raise TypeError(f"ratio must be a number in [0, 1] or a text such as '1/3', got {ratio!r}")
    if isinstance(ratio, str):
        # A pattern, not Fraction() alone: that also reads '1_0', '1e5' and unbounded powers of ten.
        text = ratio.strip()
        if len(text) > 32 or _RATIO_TEXT.fullmatch(text) is None:
            raise ValueError(f"ratio must be a number in [0, 1] or a text such as '1/3', got {ratio[:40]!r}")
        parts = [Fraction(part.strip()) for part in text.split("/")]
        if len(parts) == 2 and parts[1] == 0:
            raise ValueError(f"ratio {ratio!r} divides by zero; use 0 to checkpoint no block")
        exact = parts[0] / parts[1] if len(parts) == 2 else parts[0]
    elif isinstance(ratio, float):
        if not math.isfinite(ratio):
            raise ValueError(f"ratio must be in [0, 1], got {ratio}")
        exact = Fraction(ratio).limit_denominator(1000)
        if ratio < 0 or ratio > 1:
            exact = Fraction(ratio)
    else:
        exact = Fraction(ratio)
    if not 0 <= exact <= 1:
        hint = "use 1 to checkpoint every block" if exact > 1 else "use 0 to checkpoint none"
        raise ValueError(f"ratio must be in [0, 1], got {ratio}; {hint}")
    return exact


def select_block_indices(num_blocks: int, ratio: Ratio, *, placement: Placement = "even") -> list[int]:
    """Which of ``num_blocks`` blocks a ratio checkpoints.

    ``"even"``: block ``i`` is taken when ``floor((i + 1) * r + 1/2) > floor(i * r + 1/2)``, in exact
    arithmetic, which spreads them and takes ``floor(num_blocks * r + 1/2)`` in all. ``"prefix"``: that many
    from the front, which lowers the peak further, since the blocks whose activations are held longest are
    the first.

    Args:
        num_blocks: Number of blocks in the model.
        ratio: Fraction of blocks in [0, 1]: a number or a text such as ``"1/3"``.
        placement: ``"even"`` or ``"prefix"``.

    Returns:
        Indices from 0, ascending.

    Raises:
        TypeError: If ``ratio`` is no number or text.
        ValueError: If an argument is out of range.
    """
    if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 0:
        raise ValueError(f"num_blocks must be a non-negative integer, got {num_blocks!r}")
    if placement not in _PLACEMENTS:
        raise ValueError(f"placement must be one of {_PLACEMENTS}, got {placement!r}")
    exact = parse_ratio(ratio)

    def taken_before(i: int) -> int:
        return math.floor(i * exact + Fraction(1, 2))

    if placement == "prefix":
        return list(range(taken_before(num_blocks)))
    return [i for i in range(num_blocks) if taken_before(i + 1) > taken_before(i)]


def apply_sac(
    model: nn.Module,
    ratio: Ratio,
    *,
    placement: Placement = "even",
    preserve_rng_state: bool | Literal["auto"] = "auto",
    early_stop: bool | None = None,
) -> list[str]:
    """Checkpoint a fraction of the model's blocks: their activations are recomputed in the backward.

    Blocks that transformers can checkpoint are switched by their own flag; any other block's ``forward`` is
    replaced on the instance. Parameter names do not change. Call it before ``compile_blocks``; before or
    after ``shard_model``. A second call replaces the first. Only ``train()`` mode recomputes. Generation
    caches cannot be combined with recomputation, so ``config.use_cache`` is turned off until
    ``remove_sac``.

    Args:
        model: Any model that ``find_blocks`` reads.
        ratio: Fraction of blocks in [0, 1]: a number or a text such as ``"1/3"``.
        placement: ``"even"`` spreads them, ``"prefix"`` takes the first ones.
        preserve_rng_state: Whether the recomputation repeats the random numbers of the forward. ``"auto"``
            does so exactly when the model has any dropout or jitter; without it dropout gives wrong
            gradients.
        early_stop: Whether recomputation ends at the last tensor the backward needs; None leaves torch's
            default (yes).

    Returns:
        FQNs of the checkpointed blocks, in forward order.

    Raises:
        NoBlocksError: If the model has no blocks.
        TypeError: If ``ratio`` is no number or text.
        ValueError: If an argument is out of range.
    """
    blocks = find_blocks(model)
    indices = select_block_indices(len(blocks), ratio, placement=placement)
    if preserve_rng_state == "auto":
        preserve = draws_random_numbers(model)
    elif isinstance(preserve_rng_state, bool):
        preserve = preserve_rng_state
    else:
        raise ValueError(f"preserve_rng_state must be True, False or 'auto', got {preserve_rng_state!r}")
    recompute = _checkpoint_function(preserve, early_stop)
    remove_sac(model)
    fqns = list(blocks)
    chosen = [fqns[i] for i in indices]
    for fqn in chosen:
        _checkpoint_block(blocks[fqn], recompute)
    if chosen:
        _disable_cache(model)
    return chosen


def remove_sac(model: nn.Module) -> None:
    """Undo ``apply_sac``; nothing to do for a model without it."""
    for module in model.modules():
        for name, value in module.__dict__.pop(_STATE, {}).items():
            if isinstance(value, str) and value == _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value
    if model.__dict__.pop(_CACHE_WAS_ON, False):
        model.config.use_cache = True  # type: ignore[union-attr]


def draws_random_numbers(model: nn.Module) -> bool:
    """Whether a training forward can draw random numbers: any positive dropout, drop path or jitter."""
    return any(
        _is_noise(name, value)
        for module in model.modules()
        for name, value in [*vars(module).items(), *_config_items(module)]
    ) or any(_is_dropout(module) for module in model.modules())


def _is_noise(name: str, value: Any) -> bool:
    # layerdrop of the whole layer counts too: it decides in Python, but by the same generator.
    noisy = "drop" in name or "jitter" in name or name.endswith("pdrop")
    return noisy and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _config_items(module: nn.Module) -> list[tuple[str, Any]]:
    config = getattr(module, "config", None)
    return list(vars(config).items()) if config is not None and hasattr(config, "__dict__") else []


def _is_dropout(module: nn.Module) -> bool:
    # torch's own dropout modules share a private base; all of them carry p and say so in their name.
    return "dropout" in type(module).__name__.lower() and getattr(module, "p", 0) > 0


def _checkpoint_function(preserve_rng_state: bool, early_stop: bool | None) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if early_stop is not None:
        options["early_stop"] = early_stop
    return functools.partial(checkpoint, **options)


def _checkpoint_block(block: nn.Module, recompute: Callable[..., Any]) -> None:
    if _has_checkpointing_flag(block):
        _override(block, gradient_checkpointing=True, _gradient_checkpointing_func=recompute)
        return
    plain = block.__dict__.get("forward")  # a forward that someone set on the instance stays the inner one
    # A partial of a plain function, not a closure or a method: it survives deepcopy and pickling.
    forward = functools.partial(_forward_with_checkpointing, block)
    _override(block, forward=forward, _fsdp_sft_recompute=(recompute, plain))


def _has_checkpointing_flag(block: nn.Module) -> bool:
    # transformers.GradientCheckpointingLayer by name: a model from elsewhere must not import transformers.
    return any(
        base.__name__ == "GradientCheckpointingLayer" and base.__module__.startswith("transformers.")
        for base in type(block).__mro__
    )


def _forward_with_checkpointing(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    recompute, plain = self.__dict__["_fsdp_sft_recompute"]
    forward = plain if plain is not None else MethodType(type(self).forward, self)
    if self.training and torch.is_grad_enabled():
        return recompute(forward, *args, **kwargs)
    return forward(*args, **kwargs)


def _override(module: nn.Module, **attributes: Any) -> None:
    """Set instance attributes and remember what stood there."""
    module.__dict__[_STATE] = {name: module.__dict__.get(name, _ABSENT) for name in attributes}
    module.__dict__.update(attributes)


def _disable_cache(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "use_cache", False):
        config.use_cache = False
        model.__dict__[_CACHE_WAS_ON] = True

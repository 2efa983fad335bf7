"""What a forward of a model is given besides a batch, so that it keeps the rows of a pack apart."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.twin import text_config
from fsdp_sft._model.view import base_of, unwrapped


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Parameters of a model's forward; with adapters those of the inner model, which peft passes on."""
    return inspect.signature(base_of(unwrapped(model)).forward).parameters


def no_cache(model: nn.Module) -> dict[str, Any]:
    """Arguments that turn the cache of a model's forward off, if it has one.

    Training needs none, and with a cache transformers does not separate the rows of a pack. Models of text
    and images pass the argument on to their text model without naming it.
    """
    taken = forward_parameters(model)
    if "use_cache" not in taken and any(p.kind == p.VAR_KEYWORD for p in taken.values()):
        inner = text_model(model)
        taken = {} if inner is None else forward_parameters(inner)
    return {"use_cache": False} if "use_cache" in taken else {}


def spread_positions(model: nn.Module) -> None:
    """Let a text model with rotary positions of several axes (time, height, width) take those of text.

    It finds the rows of a pack by a further row before those of the axes: ``position_ids`` (4, B, S). Given
    (B, S), Qwen2.5-VL, GLM-4V and others of transformers 5.23 rotate as they should and join the rows;
    Qwen3-VL spreads them so itself. A second call adds nothing.
    """
    inner, rotary = text_model(model), getattr(text_config(model), "rope_parameters", None)
    axes = len(rotary.get("mrope_section") or ()) if isinstance(rotary, dict) else 0
    if inner is not None and axes:
        inner.register_forward_pre_hook(partial(_spread, axes + 1), with_kwargs=True)


def text_model(model: nn.Module) -> nn.Module | None:
    """The text model inside a transformers model; None if it says none."""
    find = getattr(base_of(unwrapped(model)), "get_decoder", None)
    found = find() if callable(find) else None
    return found if isinstance(found, nn.Module) else None


def _spread(rows: int, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook before the text model's forward."""
    positions = kwargs.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2:
        return None
    return args, {**kwargs, "position_ids": positions.expand(rows, *positions.shape)}

"""Activation checkpointing: transformers' layers, and torch's operators as a recomputation sees them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def checkpointing_flag(recompute: Callable[..., Any]) -> dict[str, Any]:
    """Attributes that make a ``GradientCheckpointingLayer`` of transformers recompute its forward.

    The layer reads the function from ``_gradient_checkpointing_func``. The public method that sets it,
    ``gradient_checkpointing_enable``, sets it for all blocks.
    """
    return {"gradient_checkpointing": True, "_gradient_checkpointing_func": recompute}


def is_checkpointing_layer(block: nn.Module) -> bool:
    """Whether a block is a ``GradientCheckpointingLayer``, whose flag recomputes its ``forward``.

    By its name: transformers may not be imported.
    """
    return any(
        base.__name__ == "GradientCheckpointingLayer" and base.__module__.startswith("transformers.")
        for base in type(block).__mro__
    )


def changes_its_inputs(op: Any) -> bool:
    """Whether an operator writes to its arguments, which only its private ``_schema`` says."""
    return bool(getattr(getattr(op, "_schema", None), "is_mutable", False))


def draws_random_numbers_now(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers when it is called with these arguments.

    Attention kernels have the tag ``nondeterministic_seeded`` even where they drop nothing. Only the private
    ``_schema`` says which of their arguments is ``dropout_p``.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            value = (
                args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            )
            return bool(value)
    return True

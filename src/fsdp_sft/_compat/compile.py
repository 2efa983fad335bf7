"""What is being compiled, and transformers' layers and torch's operators as a recomputation sees them."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


def outside_of_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that ends a compiled graph before ``function``.

    ``torch.compiler.disable`` does so, but loads Dynamo, a second of every start, where it decorates.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        own = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return own(*args, **kwargs)

    return called


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` or ``module.compile()`` was called on this very module.

    ``Module.compile`` keeps the compiled call in ``_compiled_call_impl``. ``torch.compile`` returns a wrapper
    that keeps the module in ``_orig_mod``. No public function asks for either.
    """
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def being_compiled() -> bool:
    """Whether the running code is being compiled, by Dynamo or in AOTAutograd's trace.

    torch's public ``is_compiling`` is False where ``make_fx`` traces a checkpoint, which then accepts the
    contexts of compiled code only. torch.utils.checkpoint asks for the private proxy mode.
    """
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def modules_being_traced() -> list[str]:
    """Names of the modules around the operation that is being compiled, outermost first; empty in eager mode.

    Dynamo's record of them reaches AOTAutograd's tracing in ``torch.fx.traceback``, under the undocumented
    key ``nn_module_stack``.
    """
    import re

    from torch.fx import traceback

    stack: dict[str, tuple[str, Any]] = traceback.get_current_meta().get("nn_module_stack") or {}
    return [
        re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]|\[(\d+)\]", r".\1\2", name) for name, _ in stack.values()
    ]


def checkpointing_flag(recompute: Callable[..., Any]) -> dict[str, Any]:
    """Attributes that make a ``GradientCheckpointingLayer`` of transformers recompute its forward.

    The layer reads the function from ``_gradient_checkpointing_func``. The public method that sets it,
    ``gradient_checkpointing_enable``, sets it for all blocks.
    """
    return {"gradient_checkpointing": True, "_gradient_checkpointing_func": recompute}


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

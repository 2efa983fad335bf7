"""torch.compile: compiled calls, and what is being compiled."""

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

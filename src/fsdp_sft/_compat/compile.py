"""torch.compile: compiled calls, and what is being compiled."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` or ``module.compile()`` was called on this very module.

    ``Module.compile`` keeps the compiled call in ``_compiled_call_impl``. ``torch.compile`` returns a wrapper
    that keeps the module in ``_orig_mod``. No public function asks for either.
    """
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def compiled_call_of(module: nn.Module) -> Callable[..., Any] | None:
    """The compiled call of a module, which only ``_compiled_call_impl`` holds; None without ``compile``."""
    return module.__dict__.get("_compiled_call_impl")


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replace ``_compiled_call_impl``, to set autograd's saved-tensor hooks around a compiled call.

    torch has no hooks for that: those registered on the module would be traced with it.
    """
    module.__dict__["_compiled_call_impl"] = call


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

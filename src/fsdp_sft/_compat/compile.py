"""torch.compile: compiled calls, limits of recompilation, memory budgets."""

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


LIMIT_LOGGER = "torch._dynamo.convert_frame"  # the logger of the message that limit_that_was_hit reads


def limit_that_was_hit(record: Any) -> str | None:
    """Name of the limit at which Dynamo has stopped compiling a piece of code, if a log record says so.

    Only torch's log tells; from then on that code runs as plain Python.
    """
    hit = str(record.msg).startswith("torch._dynamo hit config.")
    return str(record.args[0]) if hit and record.args else None


def being_compiled() -> bool:
    """Whether the running code is being compiled, by Dynamo or in AOTAutograd's trace.

    torch's public ``is_compiling`` is False where ``make_fx`` traces a checkpoint, which then accepts the
    contexts of compiled code only. torch.utils.checkpoint asks for the private proxy mode.
    """
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def compile_memory_budget() -> float:
    """The share of activations that compiled code may keep, as set for the whole process.

    It is set in ``torch._functorch.config``, which has no public name. The prototype
    ``torch.autograd.graph.region_activation_memory_budget`` (torch 2.13) cannot be asked for its value.
    """
    from torch._functorch import config

    return float(config.activation_memory_budget)


def backend_with_memory_budget(backend: Any, budget: float) -> Callable[..., Any]:
    """A ``torch.compile`` backend that partitions forward and backward under ``budget``.

    ``lookup_backend`` is how ``torch.compile`` turns a backend's name into a function. The budget is read
    while a graph is compiled, so it is set only then, and other models of the process keep theirs.
    """
    from functools import partial

    from torch._dynamo import lookup_backend

    return partial(_compile_with_memory_budget, lookup_backend(backend), budget)


def _compile_with_memory_budget(
    compiler: Callable[..., Any], budget: float, graph: Any, inputs: Any, **options: Any
) -> Any:
    from torch._functorch import config

    with config.patch(activation_memory_budget=budget):
        return compiler(graph, inputs, **options)


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

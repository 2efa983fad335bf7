"""Decisions such as a router's choice of experts: stored in the forward and reused in the recomputation.

A recomputed block computes its router's probabilities again. They may differ from the first ones in the last
bit, because of other kernels or another order of sums over ranks. If the probabilities of two experts are
that close, top-k then selects the other one. The backward would mix two different forwards, and its gradient
would be that of neither.

A checkpointed block that makes decisions therefore keeps the indices of its forward (for a router
``tokens * top_k`` numbers). Its recomputation does not run top-k; it gathers its own values at those indices:

    forward         p  = [.31 .30 .39]    topk(p, 2)  -> values [.39 .31], indices [2 0]; [2 0] is kept
    recomputation   p' = [.30 .31 .39]    topk(p', 2) would give indices [2 1]
                                          instead: values p'[2 0] = [.39 .30], indices [2 0]

The values of the forward are not kept, because models divide them by their sum in place.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp_sft._compat.compile import being_compiled
from fsdp_sft._compat.modules import TorchDispatchMode

_aten = torch.ops.aten
# Operations that decide: those that return (values, indices), and those that return indices alone.
_WITH_VALUES = {
    _aten.topk.default,
    _aten.sort.default,
    _aten.sort.stable,
    _aten.max.dim,
    _aten.min.dim,
    _aten.kthvalue.default,
    _aten.median.dim,
}
_INDICES_ALONE = {_aten.argmax.default, _aten.argmin.default}
# How code calls operations that decide.
_DECIDING = re.compile(r"\b(topk|sort|argsort|argmax|argmin|kthvalue)\(")
# Modules with the bases of all blocks, whose own operations are none of a block.
_OF_ANY_BLOCK = ("torch.", "transformers.modeling_layers")

Policy = Callable[..., CheckpointPolicy]


def is_decision(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation chooses among floating-point numbers, which may be rounded differently later."""
    return (op in _WITH_VALUES or op in _INDICES_ALONE) and bool(args[0].is_floating_point())


def checkpoint_of(
    blocks: dict[str, nn.Module], options: dict[str, Any], policy: Policy | None = None
) -> Callable[..., Any]:
    """``torch.utils.checkpoint.checkpoint`` with ``options``; it keeps decisions if the blocks make any.

    Args:
        blocks: The blocks that are recomputed, by FQN.
        options: Keywords of torch's function.
        policy: What a selective checkpoint saves besides; it recomputes decisions. None saves nothing.
    """
    keeps = any(map(decides, blocks.values()))
    if keeps or policy is not None:
        options = {**options, "context_fn": functools.partial(_contexts, policy, keeps)}
    return functools.partial(checkpoint, **options)


def decides(block: nn.Module) -> bool:
    """Whether a block has experts, or the files of its classes name an operation that decides.

    Other blocks are spared the dispatch mode that keeps decisions, which runs Python for each operation.
    """
    if any("expert" in name or "router" in name for name, _ in block.named_modules()):
        return True
    modules = {cls.__module__ for module in block.modules() for cls in type(module).__mro__}
    return any(_DECIDING.search(_source(name)) for name in modules if not name.startswith(_OF_ANY_BLOCK))


@functools.cache
def _source(module: str) -> str:
    """The text of a Python module; where there is none, one that names an operation that decides."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return "" if module == "builtins" else ".topk("


def _contexts(policy: Policy | None, keeps: bool) -> Any:
    """The two contexts of a checkpoint, of forward and recomputation; it ``keeps`` decisions, or not.

    In compiled code, which changes nothing in place, selective checkpointing itself saves them.
    """
    if being_compiled():
        return create_selective_checkpoint_contexts(functools.partial(_saves_decisions, policy))
    contexts = create_selective_checkpoint_contexts(policy) if policy else (nullcontext(), nullcontext())
    if not keeps:
        return contexts
    kept: list[tuple[Any, torch.Tensor, int]] = []
    # The inner contexts (of selective checkpointing) identify operations by counting them. _Repeat replaces
    # a topk by a gather, which must not be counted: a mode that is entered first sees an operation last, so
    # what it calls does not pass the inner one again.
    return _Both(_Keep(kept), contexts[0]), _Both(_Repeat(kept), contexts[1])


def _saves_decisions(
    policy: Policy | None, context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """A policy that saves decisions, and what ``policy`` saves."""
    if is_decision(op, args):
        return CheckpointPolicy.MUST_SAVE
    return policy(context, op, *args, **kwargs) if policy else CheckpointPolicy.PREFER_RECOMPUTE


class _Both:
    """Two contexts as one that can be entered repeatedly, as by a second backward."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.contexts = (outer, inner)
        self.entered = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context)
            self.entered = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self.entered.__exit__(*error)


class _Decisions(TorchDispatchMode):
    """Dispatch mode with the operation, indices and version of the indices of each decision, in order."""

    def __init__(self, kept: list[tuple[Any, torch.Tensor, int]]) -> None:
        super().__init__()
        self.kept = kept


class _Keep(_Decisions):
    """Mode of the forward: keeps every decision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if is_decision(func, args):
            indices = found[1] if func in _WITH_VALUES else found
            # The version tells later whether the model has changed the indices in place.
            self.kept.append((func, indices, indices._version))
        return found


class _Repeat(_Decisions):
    """Mode of the recomputation: repeats the kept decisions in the same order."""

    def __enter__(self) -> Any:
        self.position = 0  # each backward, if there are several, recomputes from the first decision on
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_decision(func, args):
            return func(*args, **kwargs)
        op, indices, version = (*self.kept, (None, args[0], 0))[min(self.position, len(self.kept))]
        self.position += 1
        if op is not func or indices._version != version:
            raise CheckpointError(
                f"a recomputed block chooses ({func}) where its forward did not, or the forward has changed "
                "what it chose in place: leave it out of the blocks that are checkpointed"
            )
        return _repeated(func, indices, args, kwargs)


def _repeated(func: Any, indices: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of ``func`` if it chooses ``indices``: its own values there, and a copy of the indices."""
    if func in _INDICES_ALONE:
        return indices.clone()
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    named |= kwargs
    dim = named.get("dim", -1)
    reduces = indices.ndim < args[0].ndim
    at = indices.unsqueeze(dim) if reduces else indices
    values = args[0].gather(dim, at)
    return (values.squeeze(dim) if reduces else values), indices.clone()

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import CodeType, FunctionType
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
# Names by which the code of a block's modules calls operations that decide.
_NAMES = {"topk", "sort", "argsort", "argmax", "argmin", "kthvalue"}

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def is_decision(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation chooses among floating-point numbers, which may be rounded differently later."""
    return (op in _WITH_VALUES or op in _INDICES_ALONE) and bool(args[0].is_floating_point())


def checkpoint_of(blocks: dict[str, nn.Module], options: dict[str, Any]) -> Callable[..., Any]:
    """``torch.utils.checkpoint.checkpoint`` with ``options``; it keeps decisions if the blocks make any."""
    if not any(map(decides, blocks.values())):
        return functools.partial(checkpoint, **options)
    return functools.partial(checkpoint, context_fn=_contexts, **options)


def decides(block: nn.Module) -> bool:
    """Whether a block has experts, or the code of its modules names an operation that decides.

    Other blocks are spared the dispatch mode that keeps decisions, which runs Python for each operation.
    """
    if any("expert" in name or "router" in name for name, _ in block.named_modules()):
        return True
    seen: set[Any] = set()
    classes = {cls for module in block.modules() for cls in type(module).__mro__}
    return any(
        _names_one(function, seen)
        for cls in classes
        if not cls.__module__.startswith("torch.")
        for function in vars(cls).values()
    )


def with_decisions(contexts: Contexts) -> Contexts:
    """The contexts of a checkpoint, (of the forward, of the recomputation), extended to keep decisions.

    They are for eager code; in compiled code the policy of selective checkpointing keeps decisions.
    """
    kept: list[tuple[Any, torch.Tensor, int]] = []
    # The inner contexts (of selective checkpointing) identify operations by counting them. _Repeat replaces
    # a topk by a gather, which must not be counted: a mode that is entered first sees an operation last, so
    # what it calls does not pass the inner one again.
    return _Both(_Keep(kept), contexts[0]), _Both(_Repeat(kept), contexts[1])


def _contexts() -> Contexts:
    """The contexts of a checkpoint that keeps decisions and nothing else."""
    if being_compiled():
        return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return]
    return with_decisions((nullcontext(), nullcontext()))


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save decisions and recompute everything else, in compiled code."""
    return CheckpointPolicy.MUST_SAVE if is_decision(op, args) else CheckpointPolicy.PREFER_RECOMPUTE


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


def _names_one(function: Any, seen: set[Any]) -> bool:
    """Whether a function names an operation that decides, itself or in functions of its module it calls."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    names = set(_names_in(function.__code__))
    if names & _NAMES:
        return True
    beside = (function.__globals__.get(name) for name in names)
    return any(
        _names_one(other, seen)
        for other in beside
        if isinstance(other, FunctionType) and other.__module__ == function.__module__
    )


def _names_in(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes that a code object uses, those of nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)

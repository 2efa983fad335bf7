"""What checkpointed blocks keep for the backward, sent to host memory: ``apply_sac(..., offload=True)``."""

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fsdp_sft._compat import compiled_call_of, kept_in, set_compiled_call
from fsdp_sft._host_memory import available_host_bytes
from fsdp_sft._model import tensors_in
from fsdp_sft._recompiles import AROUND_COMPILED
from fsdp_sft.sac.away import Away, Lane, Visit, identity

_LEAST_BYTES = 1 << 10  # of a tensor that is worth a copy
_HANDLES = "_fsdp_sft_offload_hooks"  # on the model


class Offload:
    """Where the chosen blocks of one model leave their activations.

    Args:
        blocks: How many blocks there are.
        keeps: Whether they keep outputs of operations beside their inputs.
    """

    def __init__(self, blocks: int, *, keeps: bool) -> None:
        self.blocks, self.keeps = blocks, keeps
        self.at_first = available_host_bytes()
        self.lanes: dict[torch.device, Lane] = {}
        self.is_settled = False  # something has left, or the person was told that nothing does
        self.current = threading.local()

    def __reduce__(self) -> Any:
        """Copies of a model have memory of their own."""
        return functools.partial(Offload, keeps=self.keeps), (self.blocks,)

    def lane(self, device: torch.device) -> Lane:
        """The copies of a device."""
        if device not in self.lanes:
            self.lanes[device] = Lane(device, self.blocks, self.at_first)
        return self.lanes[device]


def run_offloaded(
    offload: Offload, recompute: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``recompute(function, *args, **kwargs)``, whose inputs wait on the host.

    ``recompute`` is ``torch.utils.checkpoint.checkpoint`` with its options: it saves tensors among ``args``
    as autograd does, and holds on to what is in ``kwargs``.
    """
    if torch.compiler.is_compiling():  # the compiled block as a whole is a visit: _CompiledCall
        return recompute(function, *args, **kwargs)
    if isinstance(function, functools.partial):
        kwargs = {**function.keywords, **kwargs}
        function = functools.partial(function.func, *function.args)
    arguments = _arguments(args, kwargs)
    names = tuple(name for name in kwargs if any(kwargs[name] is tensor for tensor in arguments))
    values = [kwargs.pop(name) for name in names]
    with _visiting(offload, arguments, None):
        return recompute(functools.partial(_with_names, function, names), *args, *values, **kwargs)


def contexts_offloaded(offload: Offload, policy: Callable[..., Any]) -> tuple[Any, Any]:
    """``create_selective_checkpoint_contexts(policy)``, with what is kept waiting on the host."""
    keeping, using = create_selective_checkpoint_contexts(policy)
    visit: Visit | None = getattr(offload.current, "visit", None)
    if visit is None or torch.compiler.is_compiling():
        return keeping, using
    return _leaving(keeping, visit), _bringing(keeping, using)


def offload_compiled(model: nn.Module, offload: Offload, names: list[str]) -> None:
    """Let blocks that are compiled leave their activations, too: now, by ``compile_blocks``, or otherwise.

    What compiled code saves it saves as one function, after it has run, under the hooks around its call.
    """
    for name in names:
        block = model.get_submodule(name)
        block.__dict__[AROUND_COMPILED] = functools.partial(_surround, offload, block)
        _surround(offload, block)
    pre_hook = model.register_forward_pre_hook(functools.partial(_before_forward, offload, tuple(names)))
    hook = model.register_forward_hook(functools.partial(_after_forward, offload))
    model.__dict__[_HANDLES] = [pre_hook, hook]


def drop_offload(module: nn.Module) -> None:
    """Take ``offload_compiled`` back, on a model or a block."""
    for handle in module.__dict__.pop(_HANDLES, ()):
        handle.remove()
    module.__dict__.pop(AROUND_COMPILED, None)
    call = compiled_call_of(module)
    if isinstance(call, _CompiledCall):
        set_compiled_call(module, call.call)


class _CompiledCall:
    """A compiled block's call, under hooks that send away what it saves."""

    def __init__(self, offload: Offload, block: nn.Module, call: Callable[..., Any]) -> None:
        self.offload, self.block, self.call = offload, block, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.call(*args, **kwargs)
        # autograd holds on to the hooks, so these must not hold on to the arguments
        shared = _Shared(self.block, _storages(tensors_in((args, kwargs)))) if self.offload.keeps else None
        with _visiting(self.offload, _arguments(args, kwargs), shared):
            return self.call(*args, **kwargs)


def _before_forward(offload: Offload, names: tuple[str, ...], model: nn.Module, args: Any) -> None:
    for name in names:  # someone may have compiled them since
        _surround(offload, model.get_submodule(name))


def _surround(offload: Offload, block: nn.Module) -> None:
    call = compiled_call_of(block)
    if call is not None and not isinstance(call, _CompiledCall):
        set_compiled_call(block, _CompiledCall(offload, block, call))


def _after_forward(offload: Offload, model: nn.Module, args: Any, output: Any) -> None:
    if not offload.is_settled and model.training and torch.is_grad_enabled():
        offload.is_settled = True
        warnings.warn(
            f"none of the {offload.blocks} blocks that were chosen with offload=True has left anything on "
            "the host in this forward: it does not call them, or the model is compiled as a whole (use "
            "compile_blocks instead)",
            stacklevel=2,
        )


@contextmanager
def _visiting(offload: Offload, arguments: list[torch.Tensor], shared: "_Shared | None") -> Iterator[None]:
    """Send a block's own inputs to the host, for whoever saves them meanwhile.

    Args:
        offload: Where to.
        arguments: The block's hidden states, and what else has a gradient.
        shared: Says what is not the block's own; other tensors that are saved are, and go to the host as
            well. None leaves all of these alone.
    """
    offload.is_settled = True
    if not torch.is_grad_enabled():
        yield  # nothing is saved
        return
    arguments = [tensor for tensor in arguments if _can_leave(tensor)]
    if not arguments or getattr(offload.current, "visit", None) is not None:
        yield  # on a CPU, whose memory is the host's; or inside of a compiled block that was not traced whole
        return
    with offload.lane(arguments[0].device).visit() as visit:
        own = visit.not_shared(arguments)
        left = dict(zip(map(identity, own), visit.leave(own, as_inputs=True), strict=True))

        def pack(tensor: torch.Tensor) -> Any:
            found = left.get(identity(tensor))
            if found is not None:
                return found
            if shared is None or not _can_leave(tensor) or shared.has(tensor):
                return _Here(tensor)
            return visit.leave([tensor], as_inputs=False)[0]

        offload.current.visit = visit if shared is None else None
        try:
            with saved_tensors_hooks(pack, _unpack):
                yield
        finally:
            offload.current.visit = None


@contextmanager
def _leaving(keeping: Any, visit: Visit) -> Iterator[None]:
    with keeping:
        yield
    entries = [entry for entry in kept_in(keeping) if _can_leave(entry.value) and not entry.changed]
    tensors = [entry.value for entry in entries]
    for entry, away in zip(entries, visit.leave(tensors, as_inputs=False), strict=True):
        entry.replace(away)


@contextmanager
def _bringing(keeping: Any, using: Any) -> Iterator[None]:
    for entry in kept_in(keeping):
        if isinstance(entry.value, Away):
            away = entry.value
            entry.replace(away.get(), changed=away.changed)
    with using:
        yield


class _Here:
    """A saved tensor that stays, with what autograd looks at where there are no hooks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    @property
    def changed(self) -> bool:
        return self._tensor._version != self._version

    def get(self) -> torch.Tensor:
        return self._tensor


def _unpack(saved: "Away | _Here") -> torch.Tensor:
    tensor = saved.get()
    if saved.changed:
        raise RuntimeError(
            "a tensor that a checkpointed block needs for the backward has been modified by an inplace "
            f"operation since: {tuple(tensor.shape)}, {tensor.dtype}; torch says so without offload=True, too"
        )
    return tensor


def _with_names(function: Callable[..., Any], names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    positional = len(args) - len(names)
    return function(*args[:positional], **dict(zip(names, args[positional:], strict=True)), **kwargs)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The hidden states, and what has a gradient."""
    hidden = {id(value) for value in (*args[:1], kwargs.get("hidden_states"))}
    found = {
        id(value): value
        for value in (*args, *kwargs.values())
        if isinstance(value, torch.Tensor) and (id(value) in hidden or value.requires_grad)
    }
    return list(found.values())


def _can_leave(tensor: Any) -> bool:
    """Whether a tensor is the device's and has values in one piece of memory, each once."""
    if type(tensor) is not torch.Tensor or tensor.device.type in ("cpu", "meta"):
        return False
    if not tensor.is_floating_point() or tensor.numel() * tensor.element_size() < _LEAST_BYTES:
        return False
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[::-1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Shared:
    """The memory of a block's parameters, as they are in its forward, and of its arguments."""

    def __init__(self, block: nn.Module, arguments: set[int]) -> None:
        self._block, self._arguments = block, arguments
        self._parameters: set[int] | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        if self._parameters is None:
            self._parameters = _storages([*self._block.parameters(), *self._block.buffers()])
        return tensor.untyped_storage().data_ptr() in self._parameters | self._arguments


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    plain = (tensor for tensor in tensors if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer))
    return {tensor.untyped_storage().data_ptr() for tensor in plain}

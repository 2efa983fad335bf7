"""Tensors that checkpointed blocks keep for the backward, sent to host memory: ``apply_sac(offload=True)``.

Tensors are caught where autograd saves them, by ``torch.autograd.graph.saved_tensors_hooks``. Of several
nested hooks the innermost gets a tensor, so their order decides what they see. There are three cases:

    eager block         our hooks( checkpoint( its own hooks( block ) ) )
                        The checkpoint's own hooks, which drop what the block saves, are inside of ours. Ours
                        see only what the checkpoint itself saves: the block's inputs.
    compiled block      our hooks( compiled call )
                        The checkpoint is a part of the compiled code. That runs as one autograd function,
                        which saves everything at its end, so our hooks stand around the call. They see
                        inputs, parameters and what the compiled code keeps, and have to tell them apart.
    kept operations     Selective checkpointing keeps outputs in a cache of its own, where no hook sees them.
                        They are exchanged in the cache, after the forward and before the recomputation.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fsdp_sft._compat.checkpointing import kept_in
from fsdp_sft._compat.compile import compiled_call_of, set_compiled_call
from fsdp_sft._model.named import tensors_in
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.host_memory import available_host_bytes
from fsdp_sft.sac.host_copies import BlockActivations, CopyStream, HostTensor, identity

AROUND_COMPILED = "_fsdp_sft_around_compiled"  # attribute of a block: function that wraps its compiled call

_LEAST_BYTES = 1 << 10  # size from which a tensor is worth a copy
_HANDLES = "_fsdp_sft_offload_hooks"  # attribute of the model: handles of its hooks


class Offload:
    """Host memory for the activations of the chosen blocks of one model.

    Args:
        blocks: Number of chosen blocks.
        keeps: Whether they keep outputs of operations as well as their inputs.
    """

    def __init__(self, blocks: int, *, keeps: bool) -> None:
        self.blocks, self.keeps = blocks, keeps
        self.at_first = available_host_bytes()
        self.copies_by_device: dict[torch.device, CopyStream] = {}
        self.is_settled = False  # a block has been called, or a warning has said that none was
        self.current = threading.local()

    def __reduce__(self) -> Any:
        """A copy is a new object, because a copied model gets its own host memory."""
        return functools.partial(Offload, keeps=self.keeps), (self.blocks,)

    def copies(self, device: torch.device) -> CopyStream:
        """Copies of a device, made at its first use."""
        if device not in self.copies_by_device:
            self.copies_by_device[device] = CopyStream(device, self.blocks, self.at_first)
        return self.copies_by_device[device]


def run_offloaded(
    offload: Offload, recompute: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``recompute(function, *args, **kwargs)``, with its inputs held on the host.

    ``recompute`` is ``torch.utils.checkpoint.checkpoint`` with its options. It saves tensors among ``args``
    through autograd, where hooks see them, but holds those in ``kwargs`` directly. So tensors given by name
    are passed by position, and ``_with_names`` restores their names.
    """
    if torch.compiler.is_compiling():  # the hooks stand around the compiled call: _CompiledCall
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
    """``create_selective_checkpoint_contexts(policy)``, with the kept outputs held on the host."""
    keeping, using = create_selective_checkpoint_contexts(policy)
    activations: BlockActivations | None = getattr(offload.current, "activations", None)
    if activations is None or torch.compiler.is_compiling():
        return keeping, using
    return _leaving(keeping, activations), _bringing(keeping, using)


def offload_compiled(model: nn.Module, offload: Offload, names: list[str]) -> None:
    """Send the activations of compiled blocks to the host too, if compiled before or after this call.

    ``compile_blocks`` wraps the compiled call by the function at ``AROUND_COMPILED``; blocks that were
    compiled in another way are found by a hook before the model's forward.
    """
    for name in names:
        block = model.get_submodule(name)
        block.__dict__[AROUND_COMPILED] = functools.partial(_surround, offload, block)
        _surround(offload, block)
    pre_hook = model.register_forward_pre_hook(functools.partial(_before_forward, offload, tuple(names)))
    hook = model.register_forward_hook(functools.partial(_after_forward, offload))
    model.__dict__[_HANDLES] = [pre_hook, hook]


def drop_offload(module: nn.Module) -> None:
    """Undo ``offload_compiled`` on a model or a block."""
    for handle in module.__dict__.pop(_HANDLES, ()):
        handle.remove()
    module.__dict__.pop(AROUND_COMPILED, None)
    call = compiled_call_of(module)
    if isinstance(call, _CompiledCall):
        set_compiled_call(module, call.call)


class _CompiledCall:
    """A compiled block's call, surrounded by hooks that send what it saves to the host."""

    def __init__(self, offload: Offload, block: nn.Module, call: Callable[..., Any]) -> None:
        self.offload, self.block, self.call = offload, block, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.call(*args, **kwargs)
        # Autograd keeps the hooks alive until the backward. They hold addresses of the arguments, because the
        # arguments themselves would then stay in memory.
        shared = _Shared(self.block, _storages(tensors_in((args, kwargs)))) if self.offload.keeps else None
        with _visiting(self.offload, _arguments(args, kwargs), shared):
            return self.call(*args, **kwargs)


def _before_forward(offload: Offload, names: tuple[str, ...], model: nn.Module, args: Any) -> None:
    """Put hooks around the calls of compiled blocks that have none."""
    for name in names:  # a block may have been compiled since the last forward
        _surround(offload, model.get_submodule(name))


def _surround(offload: Offload, block: nn.Module) -> None:
    """Put hooks around a block's compiled call, if it has one and they are not there yet."""
    call = compiled_call_of(block)
    if call is not None and not isinstance(call, _CompiledCall):
        set_compiled_call(block, _CompiledCall(offload, block, call))


def _after_forward(offload: Offload, model: nn.Module, args: Any, output: Any) -> None:
    """Warn once if no block has run under the hooks in a training forward."""
    if not offload.is_settled and model.training and torch.is_grad_enabled():
        offload.is_settled = True
        warn_caller(
            f"none of the {offload.blocks} blocks that were chosen with offload=True has left anything on "
            "the host in this forward: it does not call them, or the model is compiled as a whole (use "
            "compile_blocks instead)"
        )


@contextmanager
def _visiting(offload: Offload, arguments: list[torch.Tensor], shared: "_Shared | None") -> Iterator[None]:
    """Send the inputs of a block to the host, and let what is saved within the context refer to the copies.

    Args:
        offload: Host memory of the model's blocks.
        arguments: The block's hidden states, and other arguments that need a gradient.
        shared: Memory of arguments and parameters, which does not belong to the block. Other tensors that
            are saved go to the host too. None leaves tensors that are not among ``arguments`` alone.
    """
    offload.is_settled = True
    if not torch.is_grad_enabled():
        yield  # nothing is saved
        return
    arguments = [tensor for tensor in arguments if _can_leave(tensor)]
    if not arguments or getattr(offload.current, "activations", None) is not None:
        # Either nothing can leave, as on a CPU; or this is inside of a compiled block, with a graph break,
        # whose call is surrounded by hooks already.
        yield
        return
    with offload.copies(arguments[0].device).forward_of_block() as activations:
        own = activations.not_shared(arguments)
        left = dict(zip(map(identity, own), activations.offload(own, as_inputs=True), strict=True))

        def pack(tensor: torch.Tensor) -> Any:
            found = left.get(identity(tensor))
            if found is not None:
                return found
            if shared is None or not _can_leave(tensor) or shared.has(tensor):
                return _Here(tensor)
            return activations.offload([tensor], as_inputs=False)[0]

        offload.current.activations = activations if shared is None else None
        try:
            with saved_tensors_hooks(pack, _unpack):
                yield
        finally:
            offload.current.activations = None


@contextmanager
def _leaving(keeping: Any, activations: BlockActivations) -> Iterator[None]:
    """The context of a selective checkpoint's forward; at its end, what it keeps is copied to the host."""
    with keeping:
        yield
    entries = [entry for entry in kept_in(keeping) if _can_leave(entry.value) and not entry.changed]
    tensors = [entry.value for entry in entries]
    for entry, away in zip(entries, activations.offload(tensors, as_inputs=False), strict=True):
        entry.replace(away)


@contextmanager
def _bringing(keeping: Any, using: Any) -> Iterator[None]:
    """The context of the recomputation; before it begins, what was kept is copied back to the device."""
    for entry in kept_in(keeping):
        if isinstance(entry.value, HostTensor):
            away = entry.value
            entry.replace(away.get(), changed=away.changed)
    with using:
        yield


class _Here:
    """A saved tensor that stays on the device, with the version that autograd would check without hooks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place since it was saved."""
        return self._tensor._version != self._version

    def get(self) -> torch.Tensor:
        """The tensor."""
        return self._tensor


def _unpack(saved: "HostTensor | _Here") -> torch.Tensor:
    """The tensor for the backward; raises if it was changed in place since it was saved."""
    # torch does not compare versions of tensors that hooks have packed, so it is done here.
    tensor = saved.get()
    if saved.changed:
        raise RuntimeError(
            "a tensor that a checkpointed block needs for the backward has been modified by an inplace "
            f"operation since: {tuple(tensor.shape)}, {tensor.dtype}; torch says so without offload=True, too"
        )
    return tensor


def _with_names(function: Callable[..., Any], names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with the last of ``args`` given by ``names``."""
    positional = len(args) - len(names)
    return function(*args[:positional], **dict(zip(names, args[positional:], strict=True)), **kwargs)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among a block's arguments that are hidden states or need a gradient."""
    hidden = {id(value) for value in (*args[:1], kwargs.get("hidden_states"))}
    found = {
        id(value): value
        for value in (*args, *kwargs.values())
        if isinstance(value, torch.Tensor) and (id(value) in hidden or value.requires_grad)
    }
    return list(found.values())


def _can_leave(tensor: Any) -> bool:
    """Whether a tensor can be copied out as one piece: floating point, dense, on an accelerator, not tiny."""
    if type(tensor) is not torch.Tensor or tensor.device.type in ("cpu", "meta"):
        return False
    if not tensor.is_floating_point() or tensor.numel() * tensor.element_size() < _LEAST_BYTES:
        return False
    # Dense means: ordered by strides, each stride is the product of the sizes before it.
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[::-1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Shared:
    """Memory of a block's arguments, and of its parameters, looked up in the forward, while gathered."""

    def __init__(self, block: nn.Module, arguments: set[int]) -> None:
        self._block, self._arguments = block, arguments
        self._parameters: set[int] | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory of the arguments, parameters or buffers."""
        if self._parameters is None:
            self._parameters = _storages([*self._block.parameters(), *self._block.buffers()])
        return tensor.untyped_storage().data_ptr() in self._parameters | self._arguments


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Addresses of the memory of plain tensors."""
    plain = (tensor for tensor in tensors if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer))
    return {tensor.untyped_storage().data_ptr() for tensor in plain}

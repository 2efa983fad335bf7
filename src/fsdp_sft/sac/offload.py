"""The inputs of checkpointed blocks, held in host memory until the backward: ``apply_sac(offload=True)``.

    our hooks( checkpoint( its own hooks( block ) ) )

Of nested saved-tensor hooks the innermost gets a tensor. The checkpoint's own, which drop what the block
saves, are inside of ours, so that ours see what the checkpoint itself saves: the block's inputs.

One stream for each device has all copies in order. Inputs leave while their block runs, and the device's
memory is freed when the next block begins. In the backward the inputs of a block come back while the block
after it runs.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fsdp_sft._compat.compile import is_compiled
from fsdp_sft._process.streams import copy_stream, host_buffer

_LEAST_BYTES = 1 << 10  # size from which a tensor is worth a copy
COMPILED = "{!r} is compiled, and offload=True is for blocks that are not: leave out one of the two"


def refuse_compiled(blocks: dict[str, nn.Module]) -> None:
    """Raise ``ValueError`` for a block that is compiled: how its inputs leave is not part of a graph."""
    for fqn, block in blocks.items():
        if is_compiled(block):
            raise ValueError(COMPILED.format(fqn))


class Offload:
    """What the blocks of one model have on the host: the inputs of the latest block, and their keys."""

    def __init__(self) -> None:
        self.latest: list[weakref.ref[HostTensor]] = []
        self.arguments: set[Any] = set()

    def __reduce__(self) -> Any:
        """A copy has nothing on the host: a copied model's forwards are its own."""
        return Offload, ()

    def leave(self, tensors: list[torch.Tensor]) -> dict[Any, "HostTensor"]:
        """Start to copy a block's inputs out, and free those of the block before; the copies by their keys.

        What the block before it had too is not copied again.
        """
        keys = {_key(tensor): tensor for tensor in tensors}
        own = {key: tensor for key, tensor in keys.items() if key not in self.arguments}
        for away in _alive(self.latest):
            away.release()
        left = {key: HostTensor(tensor, self.latest) for key, tensor in own.items()}
        self.latest = [weakref.ref(away) for away in left.values()]
        self.arguments = set(keys)
        return left


class HostTensor:
    """A tensor with its values on the host, and on the device only while it is copied or needed.

    Args:
        tensor: Tensor on an accelerator.
        before: What the block before has left, which the backward needs next.
    """

    def __init__(self, tensor: torch.Tensor, before: list["weakref.ref[HostTensor]"]) -> None:
        self.before = before
        self.changed = False  # in place, while it was copied: its values are lost then
        self.device = tensor.device
        self.here: torch.Tensor | None = None
        self.host = host_buffer(tuple(tensor.shape), tensor.dtype, tensor.device)
        self.here = tensor.detach()
        self._copy(self.host, self.here)

    def __del__(self) -> None:
        self.release()

    def get(self) -> torch.Tensor:
        """The tensor on the device, for the current stream; the block before starts to come back too."""
        self.fetch()
        assert self.here is not None
        self.changed |= self.here._version != self.version
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(self.copied)
        if current != self.compute:
            self.here.record_stream(current)
        tensor, self.here = self.here, None
        for away in _alive(self.before):
            away.fetch()
        return tensor

    def fetch(self) -> None:
        """Start to copy the tensor back to the device, unless it is there."""
        if self.here is None:
            self.here = torch.empty_like(self.host, device=self.device)
            self._copy(self.here, self.host)

    def release(self) -> None:
        """Free the device's memory, which may be used again after the copy."""
        if self.here is not None:
            self.changed |= self.here._version != self.version
            self.compute.wait_event(self.copied)
            self.here = None

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy after what the current stream has to do by now."""
        assert self.here is not None
        stream = copy_stream(self.device)
        self.compute = torch.accelerator.current_stream(self.device)
        made = self.compute.record_event()
        with stream:
            stream.wait_event(made)
            target.copy_(source, non_blocking=True)
            self.copied = stream.record_event()
        self.version = self.here._version


def run_offloaded(
    offload: Offload, recompute: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``recompute(function, *args, **kwargs)``, with its inputs held on the host.

    ``recompute`` is ``torch.utils.checkpoint.checkpoint`` with its options. It saves tensors among ``args``
    through autograd, where hooks see them, but holds those in ``kwargs`` directly. So tensors given by name
    are passed by position, and ``_with_names`` restores their names.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return recompute(function, *args, **kwargs)
    if isinstance(function, functools.partial):
        kwargs = {**function.keywords, **kwargs}
        function = functools.partial(function.func, *function.args)
    hidden = [*args[:1], kwargs.get("hidden_states")]
    leaving = [
        value
        for value in (*args, *kwargs.values())
        if _can_leave(value) and (value.requires_grad or any(value is one for one in hidden))
    ]
    names = tuple(name for name, value in kwargs.items() if any(value is one for one in leaving))
    values = [kwargs.pop(name) for name in names]
    left = offload.leave(leaving)

    def pack(tensor: torch.Tensor) -> Any:
        return left.get(_key(tensor)) or (tensor, tensor._version)

    with saved_tensors_hooks(pack, _unpack):
        return recompute(functools.partial(_with_names, function, names), *args, *values, **kwargs)


def _unpack(saved: Any) -> torch.Tensor:
    """The tensor for the backward; raises if it was changed in place since it was saved."""
    # torch does not compare versions of tensors that hooks have packed, so it is done here.
    if isinstance(saved, HostTensor):
        tensor = saved.get()
        changed = saved.changed
    else:
        tensor, version = saved
        changed = tensor._version != version
    if changed:
        raise RuntimeError(
            "a tensor that a checkpointed block needs for the backward has been modified by an inplace "
            f"operation since: {tuple(tensor.shape)}, {tensor.dtype}; torch says so without offload=True, too"
        )
    return tensor


def _with_names(function: Callable[..., Any], names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with the last of ``args`` given by ``names``."""
    positional = len(args) - len(names)
    return function(*args[:positional], **dict(zip(names, args[positional:], strict=True)), **kwargs)


def _can_leave(tensor: Any) -> bool:
    """Whether a value is a tensor to copy out: floating point, contiguous, on an accelerator, not tiny."""
    if type(tensor) is not torch.Tensor or tensor.device.type in ("cpu", "meta"):
        return False
    is_large = tensor.numel() * tensor.element_size() >= _LEAST_BYTES
    return is_large and tensor.is_floating_point() and tensor.is_contiguous()


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensor objects with the same values in the same memory.

    Autograd hands over another object for the same tensor, so objects cannot be compared. A key is valid as
    long as a tensor with that memory is alive.
    """
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version


def _alive(left: list["weakref.ref[HostTensor]"]) -> list[HostTensor]:
    """The tensors that the backward may still need, which autograd keeps alive."""
    return [away for away in (reference() for reference in left) if away is not None]

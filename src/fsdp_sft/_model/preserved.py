"""Forwards that leave no trace in a model, and run uncompiled."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.sharded import compute_device, reshard
from fsdp_sft._model.view import named_tensors
from fsdp_sft._process.generators import unmoved


@contextmanager
def uncompiled() -> Iterator[None]:
    """Context in which nothing is compiled and no compiled code runs: shapes of probes never come again.

    torch's ``set_stance`` takes effect when it is called, not when its ``with`` block begins. An error in
    between would leave the process without compiled code; hence this wrapper.
    """
    if "torch._dynamo" not in sys.modules:  # importing it takes seconds, and nothing can be compiled yet
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Context that leaves a model as it was, whatever forwards run inside.

    It restores the mode of each module, its buffers and their contents, its attributes that are plain values
    or tensors, and the random number generators of the model's devices and of the host. New attributes of
    these kinds are removed: dynamic RoPE, for instance, stores the length of the longest row so far as a
    0-dim tensor, which changes later rows. A sharded model is resharded, before and after. Gradients are not
    restored; use ``no_grad``.
    """
    reshard(model)
    devices = {tensor.device for tensor in named_tensors(model).values()} | {compute_device(model)}
    try:
        with unmoved(devices), ExitStack() as modules:
            for module in list(model.modules()):
                modules.enter_context(_unchanged(module))
            yield
    finally:
        reshard(model)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Context that leaves the attributes and buffers of one module as they were."""
    own, buffers = vars(module), dict(module._buffers)
    plain = {name: value for name, value in own.items() if _is_plain(value)}
    contents = [
        (tensor, tensor.detach().clone())
        for tensor in (*plain.values(), *buffers.values())
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta
    ]
    try:
        yield
    finally:
        for name in [name for name, value in own.items() if _is_plain(value) and name not in plain]:
            del own[name]
        own.update(plain)
        module._buffers.clear()
        module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, content in contents:
                if tensor.shape != content.shape or not torch.equal(tensor, content):
                    tensor.copy_(content)


def _is_plain(value: Any) -> bool:
    """Whether an attribute's value is a plain value or a tensor."""
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.Tensor))

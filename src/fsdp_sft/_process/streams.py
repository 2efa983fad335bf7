"""Devices and streams for threads that work for a caller, and host memory for copies from a device.

A new thread starts on device 0 and its default stream, whatever the caller's device and stream. An event
without a stream is recorded on the current stream of the *thread's* current device. If the caller works on
another device, neither waits for any of the caller's work.
"""

import functools
from collections.abc import Sequence
from contextlib import suppress

import torch


def stream_of_caller(device: torch.device) -> torch.Stream | None:
    """The calling thread's current stream on ``device``; None for the CPU, which has no streams."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


def adopt(stream: torch.Stream | None) -> None:
    """Make a caller's stream and its device the current ones of this thread.

    They are not reset, since going back to device 0 would open a context there: call it in threads that end
    with the caller's work.
    """
    if stream is not None:
        torch.accelerator.set_stream(stream)


@functools.cache
def copy_stream(device: torch.device) -> torch.Stream:
    """The stream of all copies of an accelerator that run while it computes, which keeps them in order."""
    return torch.Stream(device=device)


def travelling(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` copied to ``device`` asynchronously.

    Host memory is pinned first: CUDA copies more than 64 KiB of unpinned memory only after all work queued
    before, and the host waits for that.
    """
    if tensor.device == device or device.type in ("cpu", "meta") or tensor.device.type != "cpu":
        return tensor.to(device, non_blocking=device.type != "cpu")
    with suppress(RuntimeError):  # this accelerator, or this tensor, cannot be pinned
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class LateValues:
    """Values of tensors that are copied to the host asynchronously: one float64 after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        wide = [tensor.detach().to(torch.float64).reshape(-1) for tensor in tensors]
        self._copies = [
            host_buffer(tuple(one.shape), one.dtype, one.device).copy_(one, non_blocking=True) for one in wide
        ]
        self._events = [
            stream.record_event()
            for stream in map(stream_of_caller, {one.device for one in wide})
            if stream is not None
        ]

    def read(self) -> list[float]:
        """The values, in the tensors' order; the host waits once for each device that holds any."""
        for event in self._events:
            event.synchronize()
        return [value for copy in self._copies for value in copy.tolist()]


def host_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in host memory; the host waits once per device that holds any of them."""
    copies = [
        t if t.is_cpu else host_buffer(tuple(t.shape), t.dtype, t.device).copy_(t, non_blocking=True)
        for t in tensors
    ]
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        torch.accelerator.current_stream(device).synchronize()
    return copies


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """New host memory for copies to and from ``device``; pinned if the accelerator supports that.

    Copies from and to pinned memory are asynchronous: the host may read or write the buffer only after an
    event on the copying stream has passed.
    """
    if device.type in ("cpu", "meta"):
        return torch.empty(shape, dtype=dtype)
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:  # this accelerator has no pinned memory; its copies go through a staging buffer
        return torch.empty(shape, dtype=dtype)

"""Devices and streams for threads that work for a caller, and host memory for copies from a device.

A new thread starts on device 0 and its default stream, whatever the caller's device and stream. An event
without a stream is recorded on the current stream of the *thread's* current device. If the caller works on
another device, neither waits for any of the caller's work.
"""

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CallerStream:
    """The stream that a caller works on, for threads that it starts.

    Attributes:
        stream: Current stream of the thread that called ``on``; None for the CPU, which has no streams.
    """

    stream: torch.Stream | None

    @classmethod
    def on(cls, device: torch.device) -> "CallerStream":
        """The calling thread's current stream on ``device``."""
        return cls(None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device))

    def adopt(self) -> None:
        """Make the caller's device and stream the current ones of this thread.

        They are not reset, since going back to device 0 would open a context there: call it in threads that
        end with the caller's work.
        """
        if self.stream is not None:
            torch.accelerator.set_stream(self.stream)

    def record(self) -> torch.Event | None:
        """An event that follows all work queued on the stream so far; None for the CPU."""
        return None if self.stream is None else self.stream.record_event()


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
        self._read: list[float] | None = None
        self._sizes = [tensor.numel() for tensor in tensors]
        self._parts: list[tuple[list[int], torch.Tensor, torch.Event | None]] = []
        for device in {tensor.device for tensor in tensors}:
            here = [index for index, tensor in enumerate(tensors) if tensor.device == device]
            wide = torch.cat([tensors[index].detach().to(torch.float64).reshape(-1) for index in here])
            buffer = host_buffer(tuple(wide.shape), wide.dtype, device).copy_(wide, non_blocking=True)
            self._parts.append((here, buffer, CallerStream.on(device).record()))

    def read(self) -> list[float]:
        """The values, in the tensors' order; the first call waits, once for each device that holds any."""
        if self._read is None:
            found: dict[int, list[float]] = {}
            for here, buffer, event in self._parts:
                if event is not None:
                    event.synchronize()
                parts = buffer.split([self._sizes[index] for index in here])
                found.update((index, part.tolist()) for index, part in zip(here, parts, strict=True))
            self._read = [value for index in sorted(found) for value in found[index]]
            self._parts.clear()
        return self._read


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

"""Devices and streams for code that runs in other threads than its caller's, and host memory for its copies.

A new thread starts on device 0 and on its default stream, whatever the caller had chosen; an event without
a stream is recorded on the current stream of the *thread's* current device. On any other device, work that
relies on either is ordered after nothing.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CallerStream:
    """The stream that a caller works on, for its threads to work on too.

    Attributes:
        stream: The current one in the thread that called ``on``; None for the CPU, which has no streams.
    """

    stream: torch.Stream | None

    @classmethod
    def on(cls, device: torch.device) -> "CallerStream":
        """The calling thread's current stream on ``device``."""
        return cls(None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device))

    def adopt(self) -> None:
        """Let this thread work on the caller's device and stream from now on.

        For threads that end with that work: going back to device 0 would open a context there.
        """
        if self.stream is not None:
            torch.accelerator.set_stream(self.stream)

    def record(self) -> torch.Event | None:
        """An event after all that has been queued on the stream so far; None for the CPU."""
        return None if self.stream is None else self.stream.record_event()


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Fresh host memory for copies to and from ``device``: pinned, where an accelerator can pin.

    Copies of pinned memory run while the host goes on, so it may be written to (or read) only after an event
    on the stream that copies.
    """
    if device.type in ("cpu", "meta"):
        return torch.empty(shape, dtype=dtype)
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except (
        RuntimeError,
        NotImplementedError,
    ):  # this accelerator has no pinned memory: its copies are staged
        return torch.empty(shape, dtype=dtype)

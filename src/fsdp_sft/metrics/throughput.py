"""Tokens per second, FLOP/s, MFU and the shares of time spent waiting and pausing over the last steps."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from fsdp_sft._process.devices import resolve_device, synchronize
from fsdp_sft._process.words import answered
from fsdp_sft.metrics.flops import peak_flops_per_second


class ThroughputMeter:
    """Tokens per second, TFLOP/s, MFU and the shares of time spent waiting over the last optimizer steps.

    Time is wall-clock time between calls of `update`. The device is not synchronised, since over several
    steps the host cannot run ahead of it by much. Each rank may have a meter: given the global number of
    tokens, all of them report the same, up to jitter.

    Args:
        world_size: Number of ranks that share the tokens, >= 1.
        flops_per_token: Training FLOPs per token (see `model_flops_per_token`); None leaves TFLOP/s and MFU
            None.
        device: Device whose peak MFU refers to; None means the current accelerator if there is one, otherwise
            the CPU.
        peak_flops: Peak of one device in FLOP/s; None takes that of `peak_flops_per_second`.
        averaged_steps: Optimizer steps to average over, >= 1.
        warmup_steps: First steps that are left out (compilation, allocation, first read), >= 0. The first
            step starts when the meter is made.
        clock: Monotonic function that returns seconds; for tests.

    Example:
        >>> ticks = iter([0.0, 5.0, 7.0, 9.0])
        >>> meter = fs.ThroughputMeter(world_size=2, device="cpu", clock=lambda: next(ticks))
        >>> for _ in range(3):
        ...     meter.update(num_tokens=1000)
        >>> meter.stats()["tokens_per_second_per_gpu"]
        250.0
    """

    @answered
    def __init__(
        self,
        *,
        world_size: int,
        flops_per_token: int | None = None,
        device: torch.device | str | int | None = None,
        peak_flops: float | None = None,
        averaged_steps: int = 20,
        warmup_steps: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = resolve_device(device)
        self._world_size = world_size
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops_per_second(self._device) if peak_flops is None else peak_flops
        self._warmup_left = warmup_steps
        # Of each step the tokens of all ranks, its seconds without pauses, what of them this rank waited for
        # its loader ("data") and for other ranks ("ranks"), and the seconds of pauses.
        self._steps: deque[dict[str, float]] = deque(maxlen=averaged_steps)
        self._clock = clock
        self._pause_depth = 0
        self._spent: dict[str, float] = defaultdict(float)  # seconds of this step, by what they went on
        self._watched: set[str] = set()
        self._last = clock()

    def update(self, *, num_tokens: int) -> None:
        """Count one optimizer step, at its end.

        Args:
            num_tokens: Tokens of the step over all ranks and micro-batches, >= 0.

        Raises:
            RuntimeError: Called inside `paused()`, whose time would then be missing.
        """
        if self._pause_depth:
            raise RuntimeError("update() was called inside paused(); leave the pause before the next step")
        now = self._clock()
        step = {"tokens": num_tokens, "seconds": now - self._last - self._spent["paused"], **self._spent}
        self._last = now
        self._spent.clear()
        if self._warmup_left:
            self._warmup_left -= 1
        else:
            self._steps.append(step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from the current step, for evaluation and saving. May be nested.

        An accelerator is synchronised on entry and exit, so that training work still queued is counted and
        work queued inside is not.
        """
        self._pause_depth += 1
        start = self._now_when_idle() if self._pause_depth == 1 else 0.0
        try:
            yield
        finally:
            if self._pause_depth == 1:
                self._spent["paused"] += self._now_when_idle() - start
            self._pause_depth -= 1

    def stats(self) -> dict[str, float | None]:
        """Means over the steps that are averaged, ready for `MetricLogger.log`.

        Returns:
            `tokens_per_second` (all ranks), `tokens_per_second_per_gpu`, `step_seconds`, `last_step_seconds`
            (of the last step alone), `tflops_per_gpu` (1e12 FLOP/s), `mfu` (fraction of the peak, 0 to 1),
            `data_wait_share` and `rank_wait_share` (fractions of this rank's step time, 0 to 1: in the
            loader, and until the other ranks had their batches) and `paused_share` (fraction of
            this rank's whole time that was inside `paused()`). None where it is not known: all before the
            first measured step; the FLOP rates without `flops_per_token`; `mfu` without a known peak;
            `data_wait_share` and `rank_wait_share` unless `windows` has the meter.
        """
        names = ("tokens", "seconds", "data", "ranks", "paused")
        tokens, seconds, data, ranks, paused = (sum(s.get(name, 0.0) for s in self._steps) for name in names)
        measured = seconds > 0
        tokens_per_second = tokens / seconds if measured else None
        per_gpu = None if tokens_per_second is None else tokens_per_second / self._world_size
        flops = None if per_gpu is None or self._flops_per_token is None else per_gpu * self._flops_per_token
        return {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_gpu": per_gpu,
            "step_seconds": seconds / len(self._steps) if measured else None,
            "last_step_seconds": self._steps[-1]["seconds"] if measured else None,
            "tflops_per_gpu": None if flops is None else flops / 1e12,
            "mfu": None if flops is None or self._peak_flops is None else flops / self._peak_flops,
            "data_wait_share": data / seconds if measured and "data" in self._watched else None,
            "rank_wait_share": ranks / seconds if measured and "ranks" in self._watched else None,
            "paused_share": paused / (seconds + paused) if measured else None,
        }

    @contextmanager
    def waiting_for(self, whom: Literal["data", "ranks"]) -> Iterator[None]:
        """Count the time inside as waiting for the loader or for other ranks, as `windows(meter=)` does."""
        self._watched.add(whom)
        start = self._clock()
        try:
            yield
        finally:
            if not self._pause_depth:  # a pause is left out of the step, and so is the waiting inside it
                self._spent[whom] += self._clock() - start

    def _now_when_idle(self) -> float:
        synchronize(self._device)
        return self._clock()

"""A torch profiler trace of a few optimizer steps in the middle of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch

from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.devices import resolve_device, synchronize
from fsdp_sft._process.trace_spans import DEVICE
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft._tensors.disk import full_path


class StepProfiler:
    """Records the steps from `first_step` to `last_step` and writes one trace per chosen rank.

    The trace begins when the step before `first_step` has ended, so it includes data loading, and is written
    when `last_step` has ended: `<folder>/rank-<R>-steps-<first>-<last>.json.gz`, for https://ui.perfetto.dev
    or chrome://tracing; `trace_seconds` sums it up. Other steps cost nothing. Skip the first few steps, which
    allocate and compile. `end_step` writes the trace, which takes seconds: call it under
    `ThroughputMeter.paused`.

    Args:
        folder: Where traces go; made when one is written.
        first_step: First recorded optimizer step, >= 1.
        last_step: Last recorded optimizer step, >= `first_step`; a few are enough, since a trace of a large
            model has about 10 MB per step.
        ranks: Ranks that record; None means all.
        initial_step: Steps done before this process started (resume), >= 0.
        with_stack: Also record Python's call stacks; writing the trace may then take a minute even for a
            small model.

    Raises:
        ValueError: The steps are not in order.

    Memory: events of the recorded steps, on the host, until the trace is written.

    Example:
        >>> with fs.StepProfiler("traces", first_step=2, last_step=2) as profiler:
        ...     for step, window in enumerate(fs.windows(loader, 1), start=1):
        ...         result = fs.train_step(model, window, optimizer)
        ...         profiler.end_step(step)
        >>> profiler.trace.name
        'rank-0-steps-2-2.json.gz'
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        first_step: int,
        last_step: int,
        ranks: tuple[int, ...] | None = (0,),
        initial_step: int = 0,
        with_stack: bool = False,
    ) -> None:
        if initial_step < 0 or not 1 <= first_step <= last_step:
            raise ValueError(
                f"steps must satisfy 1 <= first_step <= last_step and initial_step >= 0, got "
                f"first_step={first_step}, last_step={last_step}, initial_step={initial_step}"
            )
        self._folder = full_path(folder)
        self._first, self._last, self._done = first_step, last_step, initial_step
        self._ranks = ranks
        self._with_stack = with_stack
        self._profile: Any = None
        self._written: Path | None = None

    @property
    def trace(self) -> Path | None:
        """The file that this rank has written; None before that, and on ranks that do not record."""
        return self._written

    def end_step(self, step: int) -> None:
        """Report the end of optimizer step `step`.

        Raises:
            ValueError: `step` does not come after the one before it.
        """
        if step <= self._done:
            raise ValueError(f"steps must ascend, got {step} after {self._done}")
        self._done = step
        if self._profile is not None and step >= self._last:
            self._write()
        else:
            self._start_if_next()

    def __enter__(self) -> Self:
        """Start recording at once if `first_step` is the next step."""
        self._start_if_next()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Write what was recorded if the run ended before `last_step`; warn if nothing was."""
        if self._profile is not None:
            self._write()
        elif self._written is None and self._records():
            warn_caller(
                f"no trace: the run ended after step {self._done}, or had started after step {self._first}; "
                f"steps {self._first} to {self._last} were to be recorded"
            )

    def _records(self) -> bool:
        return self._ranks is None or this_rank() in self._ranks

    def _start_if_next(self) -> None:
        """Start recording if `first_step` is the next step."""
        due = self._done + 1 == self._first and self._profile is None and self._records()
        if not due:
            return
        synchronize(resolve_device(None))  # else the trace would hold kernels of the step before
        self._profile = torch.profiler.profile(
            activities=torch.profiler.supported_activities(), with_stack=self._with_stack
        )
        self._profile.start()
        self._profile.add_metadata(DEVICE, resolve_device(None).type)

    def _write(self) -> None:
        """Stop recording and write the trace."""
        synchronize(resolve_device(None))
        profile, self._profile = self._profile, None
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        last = min(self._done, self._last)
        self._written = self._folder / f"rank-{this_rank()}-steps-{self._first}-{last}.json.gz"
        profile.export_chrome_trace(str(self._written))

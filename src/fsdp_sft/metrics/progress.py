"""A progress bar that shows the metrics of each step."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import IO, Any

from fsdp_sft.metrics.memory import PEAKS
from fsdp_sft.metrics.sinks import Scalar


class ProgressBar:
    """A tqdm bar as a sink of `MetricLogger`: loss, tokens/s, MFU and memory, as far as they are logged.

    It looks for `loss`, `tokens_per_second`, `mfu`, `data_wait_share`, `rank_wait_share`, a peak of
    `memory_stats` and `num_alloc_retries`. What is unknown or absent is not shown. The shares of time waiting
    for data and for other ranks are shown from 5 %, retries of the allocator only if there are any. Rows
    without `loss`, such as those of an evaluation, leave the bar where it is. The bar appears at the first
    `log`, on the main rank alone.

    Args:
        total_steps: Optimizer steps of the whole run, >= 1.
        initial_step: Steps done before this process started (resume), >= 0.
        stream: Text stream to draw on; None means `sys.stderr`.

    Raises:
        ValueError: `total_steps` below 1 or `initial_step` below 0.

    Example:
        >>> logger = fs.MetricLogger(stdout=False, sinks=[fs.ProgressBar(total_steps=100)])
        >>> logger.log({"loss": 0.5}, step=1)  # draws the bar, and the text of `bar_text`
        >>> logger.close()
        >>> metrics = {"loss": 0.5, "tokens_per_second": 81234.0, "mfu": None}
        >>> bar_text({**metrics, "peak_resident_bytes": 7 << 30})
        'loss 0.5000, 81.2k tok/s, 7.0 GiB'
    """

    def __init__(self, *, total_steps: int, initial_step: int = 0, stream: IO[str] | None = None) -> None:
        for name, value, least in (("total_steps", total_steps, 1), ("initial_step", initial_step, 0)):
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        self._total = total_steps
        self._initial = initial_step
        self._stream = stream
        self._bar: Any = None

    def log(self, metrics: Mapping[str, Scalar], step: int) -> None:
        """Move the bar to `step` and show the metrics beside it."""
        if "loss" not in metrics:
            return
        if self._bar is None:
            tqdm = import_module("tqdm").tqdm  # comes with transformers
            self._bar = tqdm(
                total=self._total, initial=self._initial, unit="step", file=self._stream, dynamic_ncols=True
            )
        self._bar.set_postfix_str(bar_text(metrics), refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None


def bar_text(metrics: Mapping[str, Scalar]) -> str:
    """The text beside the bar."""
    parts = []
    for key, show in (
        ("loss", lambda v: f"loss {v:.4f}"),
        ("tokens_per_second", lambda v: f"{_short(v)} tok/s"),
        ("mfu", lambda v: f"MFU {v:.1%}"),
        ("data_wait_share", lambda v: f"data wait {v:.0%}" if v >= 0.05 else ""),
        ("rank_wait_share", lambda v: f"rank wait {v:.0%}" if v >= 0.05 else ""),
    ):
        value = metrics.get(key)
        if isinstance(value, (int, float)):
            parts.append(show(value))
    peak = next((metrics[key] for key in PEAKS if isinstance(metrics.get(key), (int, float))), None)
    if isinstance(peak, (int, float)):
        parts.append(f"{peak / (1 << 30):.1f} GiB")
    if metrics.get("num_alloc_retries"):
        parts.append(f"{metrics['num_alloc_retries']} allocator retries")
    return ", ".join(part for part in parts if part)


def _short(value: float) -> str:
    return (
        f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"
    )

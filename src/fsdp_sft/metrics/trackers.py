"""Sinks for experiment trackers: TensorBoard, Weights & Biases, trackio; each needs its own package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fsdp_sft._process.callers import warn_caller
from fsdp_sft._tensors.disk import full_path
from fsdp_sft.metrics.sinks import Scalar


class TensorBoardSink:
    """Scalars in a folder that `tensorboard --logdir` shows.

    Text is written as text. None is left out, so an unknown MFU is a gap in the curve and not a zero.

    Args:
        folder: Folder of the event file; made at the first `log`.

    Raises:
        ImportError: TensorBoard is not installed.

    Example:
        >>> sink = fs.TensorBoardSink("runs")  # doctest: +SKIP
        >>> logger = fs.MetricLogger(sinks=[sink])  # doctest: +SKIP
        >>> logger.log({"loss": 0.5}, step=1)  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        _require("tensorboard")
        self._folder = full_path(folder)
        self._writer: Any = None

    def log(self, metrics: Mapping[str, Scalar], step: int) -> None:
        """Add one point to each metric's curve."""
        if self._writer is None:
            self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(self._folder))
        for key, value in metrics.items():
            if isinstance(value, str):
                self._writer.add_text(key, value, step)
            elif value is not None:
                self._writer.add_scalar(key, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _RunSink(ABC):
    """What wandb and trackio have in common: a module with `init`, and a run with `log` and `finish`."""

    _module: str

    def __init__(self, init: Mapping[str, Any]) -> None:
        if not isinstance(init, Mapping):
            raise TypeError(
                f"init holds the arguments of {self._module}.init, such as {{'project': 'sft'}}; "
                f"got {type(init).__name__}"
            )
        _require(self._module)
        self._init = dict(init)
        self._run: Any = None
        self._is_own = False

    def log(self, metrics: Mapping[str, Scalar], step: int) -> None:
        """Send the metrics of one step, without those that are None, to a run that is started if needed."""
        if self._run is None:
            module = _require(self._module)
            self._run = self._run_going_on(module)
            self._is_own = self._run is None
            if self._is_own:
                self._run = module.init(**self._init)
            elif self._init:
                warn_caller(
                    f"a run of {self._module} is going on: it is written to and left open, and the arguments "
                    f"for another ({', '.join(self._init)}) are not used"
                )
        row = {key: value for key, value in metrics.items() if value is not None}
        self._run.log(row, step=step)

    def close(self) -> None:
        """End the run, if it was started here."""
        if self._run is not None and self._is_own:
            self._finish(self._run)
        self._run = None

    def _finish(self, run: Any) -> None:
        run.finish()

    @abstractmethod
    def _run_going_on(self, module: Any) -> Any:
        """The run that the program has started itself; None without one."""


class WandbSink(_RunSink):
    """A run of Weights & Biases, started at the first `log` and so on the main rank alone.

    If the program has called `wandb.init` itself, metrics go to that run, `init` is ignored with a warning,
    and `close` leaves the run open.

    wandb takes steps in ascending order: it drops an earlier step than the last one with a warning. After a
    resume from an older checkpoint, start another run.

    Args:
        init: Arguments of `wandb.init`, such as `{"project": "sft", "config": {...}}`.

    Raises:
        TypeError: `init` is not a mapping.
        ImportError: The package is not installed.

    Example:
        >>> sink = fs.WandbSink({"project": "sft", "config": {"lr": 1e-5}})  # doctest: +SKIP
        >>> logger = fs.MetricLogger(sinks=[sink])  # doctest: +SKIP
        >>> logger.log({"loss": 0.5}, step=1)  # doctest: +SKIP
        >>> logger.close()  # doctest: +SKIP
    """

    _module = "wandb"

    def _run_going_on(self, module: Any) -> Any:
        return getattr(module, "run", None)


class TrackioSink(_RunSink):
    """A run of trackio, which keeps its data on this machine; started at the first `log`.

    If the program has called `trackio.init` itself, metrics go to that run, `init` is ignored with a warning,
    and `close` leaves the run open.

    Args:
        init: Arguments of `trackio.init`, such as `{"project": "sft"}`.

    Raises:
        TypeError: `init` is not a mapping.
        ImportError: The package is not installed.

    Example:
        >>> sink = fs.TrackioSink({"project": "sft"})  # doctest: +SKIP
        >>> logger = fs.MetricLogger(sinks=[sink])  # doctest: +SKIP
        >>> logger.log({"loss": 0.5}, step=1)  # doctest: +SKIP
        >>> logger.close()  # doctest: +SKIP
    """

    _module = "trackio"

    def _run_going_on(self, module: Any) -> Any:
        current = getattr(getattr(module, "context_vars", None), "current_run", None)
        return current.get() if current is not None else None

    def _finish(self, run: Any) -> None:
        module = import_module(self._module)
        if self._run_going_on(module) is run and hasattr(module, "finish"):
            module.finish()  # the module's finish also forgets the run; the run's own does not
        else:
            run.finish()


def _require(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is not installed: pip install {module}") from error

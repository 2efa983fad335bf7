"""Figures of matplotlib, drawn without pyplot, which would choose a backend for the whole process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_sft._tensors.disk import full_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, *, dpi: int = 120) -> Figure:
    """An empty figure of so many inches, whose parts are laid out so that they do not overlap.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("matplotlib is not installed: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained", dpi=dpi)


def save_figure(figure: Figure, out: str | Path, *, file_format: str | None = None) -> Path:
    """Write a figure, in the format of the file's suffix if none is given; parent folders are made."""
    path = full_path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi="figure", format=file_format)
    return path

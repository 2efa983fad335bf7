"""The names of the folders of steps below a root."""

import re
from pathlib import Path

_NAME = re.compile(r"step-(0|[1-9]\d*)")


def step_folder(root: Path, step: int) -> Path:
    """The folder of a step."""
    return root / f"step-{step}"


def step_number(folder: Path) -> int | None:
    """Number of the step that a folder is named after; None if its name is not that of a step."""
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[1])


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) pairs below ``root``, in ascending order."""
    if not root.is_dir():
        return []
    found = [(step_number(path), path) for path in root.iterdir() if path.is_dir()]
    return sorted((step, path) for step, path in found if step is not None)


def is_step_folder(path: Path) -> bool:
    """Whether a path is that of one step rather than a root of several."""
    return step_number(path) is not None and not step_folders(path)

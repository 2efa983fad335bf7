"""The folders of steps below a root, by their names."""

import re
from pathlib import Path

_NAME = re.compile(r"step-(0|[1-9]\d*)")


def step_folder(root: Path, step: int) -> Path:
    """Where a step goes."""
    return root / f"step-{step}"


def step_number(folder: Path) -> int | None:
    """The step that a folder is named for; None if it is not named for one."""
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[1])


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) pairs below ``root``, oldest first."""
    if not root.is_dir():
        return []
    found = [(step_number(path), path) for path in root.iterdir() if path.is_dir()]
    return sorted((step, path) for step, path in found if step is not None)


def is_step_folder(path: Path) -> bool:
    """Whether a path names one step rather than a root of several."""
    return step_number(path) is not None and not step_folders(path)

"""Which checkpoints a folder has, which are sound, and which go."""

import os
import re
import shutil
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path

from fsdp_sft.dcp_io.manifest import verify_folder

_STEP_NAME = re.compile(r"step-(0|[1-9]\d*)")


@dataclass(frozen=True)
class CheckpointInfo:
    """One step below a root.

    Attributes:
        step: Its number.
        path: Its folder.
        sound: Whether the manifest is sound and every file is there with its size; the contents are for
            ``verify_checkpoint``.
    """

    step: int
    path: Path
    sound: bool


def find_checkpoints(root: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The steps below ``root``, oldest first; none if there is no such folder.

    Looks from this process alone, and not into the contents of files.
    """
    return [
        CheckpointInfo(step, path, not verify_folder(path, hashes=False))
        for step, path in step_folders(Path(root).absolute())
    ]


def verify_checkpoint(path: str | os.PathLike[str]) -> list[str]:
    """Read one step completely and say what is wrong with it.

    Returns:
        Problems, each naming its file; empty if the checkpoint is exactly what was written.
    """
    return verify_folder(Path(path).absolute(), hashes=True)


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) pairs below ``root``, oldest first."""
    if not root.is_dir():
        return []
    found = [(_STEP_NAME.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in found if match is not None)


def step_folder(root: Path, step: int) -> Path:
    """Where a step goes."""
    return root / f"step-{step}"


def is_step_folder(path: Path) -> bool:
    """Whether a path names one step rather than a root of several."""
    return _STEP_NAME.fullmatch(path.name) is not None and not step_folders(path)


def prune(root: Path, *, keep_last: int | None, just_saved: int) -> None:
    """Delete sound steps beyond the newest ``keep_last``, never the one just saved.

    Unsound ones neither count nor go: someone may want to look at them. A step that cannot be deleted is
    warned about; the checkpoint that was just saved stands.
    """
    if keep_last is None:
        return
    others = [
        info.path
        for info in find_checkpoints(root)
        if info.sound and info.step != just_saved and not info.path.is_symlink()
    ]
    for path in others[: max(0, len(others) - (keep_last - 1))]:
        doomed = root / f".tmp-pruned-{path.name}-{uuid.uuid4().hex}"
        try:
            os.rename(path, doomed)  # so that a step is never there by half
            shutil.rmtree(doomed)
        except OSError as error:
            warnings.warn(f"could not delete the old checkpoint {path}: {error}", stacklevel=3)


def remove_stale(root: Path) -> None:
    """Delete what saves that were killed have left below ``root``."""
    for path in root.glob(".tmp-*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)

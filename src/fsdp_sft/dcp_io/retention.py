"""Which checkpoints a folder has, which are sound, and which go."""

import logging
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

from fsdp_sft._disk import temporary_beside
from fsdp_sft.dcp_io.manifest import read_manifest
from fsdp_sft.dcp_io.steps import step_folders
from fsdp_sft.dcp_io.verify import file_problems, verify_folder
from fsdp_sft.errors import CheckpointCorruptError

_logger = logging.getLogger("fsdp_sft.dcp_io")


@dataclass(frozen=True)
class CheckpointInfo:
    """One step below a root.

    Attributes:
        step: Its number.
        path: Its folder.
        sound: Whether the manifest is sound and every file is there with its size; the contents are for
            ``verify_checkpoint``.
        metric: What it was saved with, lower being better; None if with nothing finite.
    """

    step: int
    path: Path
    sound: bool
    metric: float | None = None


def find_checkpoints(root: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The steps below ``root``, oldest first; none if there is no such folder.

    Looks from this process alone, and not into the contents of files. A step that another job deletes
    meanwhile is left out.

    Raises:
        OSError: If a step must not be read, or nothing could be opened now.
    """
    found = [_info(step, path) for step, path in step_folders(Path(root).absolute())]
    return [info for info in found if info.sound or info.path.exists()]


def _info(step: int, path: Path) -> CheckpointInfo:
    try:
        manifest = read_manifest(path)
    except CheckpointCorruptError:
        return CheckpointInfo(step, path, sound=False)
    problems = file_problems(path, manifest, list(manifest.files), hashes=False, headers=False)
    return CheckpointInfo(step, path, not problems, manifest.metric)


def verify_checkpoint(path: str | os.PathLike[str]) -> list[str]:
    """Read one step completely and say what is wrong with it.

    Returns:
        Problems, each naming its file; empty if the checkpoint is exactly what was written.
    """
    return verify_folder(Path(path).absolute(), hashes=True)


def prune(root: Path, *, keep_last: int | None, keep_best: int, just_saved: int) -> None:
    """Delete sound steps other than the newest ``keep_last`` and the best ``keep_best``.

    The one just saved stays and counts among the newest. Of equal metrics the newer is better. Unsound ones
    neither count nor go: someone may want to look at them. What goes is logged as a warning, which Python
    prints unless told otherwise. Steps that cannot be looked at now, or deleted, are warned about; the
    checkpoint that was just saved stands.
    """
    if keep_last is None:
        return
    try:
        sound = [info for info in find_checkpoints(root) if info.sound]
    except OSError as error:
        warnings.warn(f"could not look at the steps below {root}; none was deleted: {error}", stacklevel=4)
        return
    others = [info for info in sound if info.step != just_saved]
    measured = [info for info in sound if info.metric is not None]
    best = sorted(measured, key=lambda info: (info.metric, -info.step))[:keep_best]
    newest = others[max(0, len(others) - (keep_last - 1)) :]
    kept = {info.step for info in [*newest, *best]}
    surplus = [info.path for info in others if info.step not in kept and not info.path.is_symlink()]
    deleted = [path.name for path in surplus if _delete(root, path)]
    if deleted:
        _logger.warning(
            "keep_last=%d, keep_best=%d: deleted %s from %s", keep_last, keep_best, ", ".join(deleted), root
        )


def _delete(root: Path, path: Path) -> bool:
    doomed = temporary_beside(root / f"pruned-{path.name}")
    try:
        os.rename(path, doomed)  # so that a step is never there by half
        shutil.rmtree(doomed)
    except OSError as error:
        warnings.warn(f"could not delete the old checkpoint {path}: {error}", stacklevel=4)
        return False
    return True

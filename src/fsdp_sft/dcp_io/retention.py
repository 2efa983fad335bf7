"""Finding the checkpoints below a root, checking that they are sound, and deleting old ones."""

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from fsdp_sft._process.callers import warn_caller
from fsdp_sft._tensors.disk import full_path, temporary_beside
from fsdp_sft.dcp_io.folder import examine
from fsdp_sft.dcp_io.manifest import step_folders

_logger = logging.getLogger("fsdp_sft.dcp_io")
# By root, with links followed: the steps of this run, which are those that it has saved, and those up to one
# that it has loaded.
_own_steps: dict[Path, set[int]] = {}


@dataclass(frozen=True)
class CheckpointInfo:
    """One step below a root.

    Attributes:
        step: Number of the step.
        path: Folder of the step.
        sound: Whether the manifest is sound and every file is there with its size. ``verify_checkpoint``
            checks the contents too.
        metric: Metric that it was saved with, lower being better; None if not finite or not given.

    Example:
        >>> saved = fs.save_checkpoint("ckpt", 1, model=model, metric=0.5)
        >>> info = fs.find_checkpoints("ckpt")[0]
        >>> info.step, info.sound, info.metric
        (1, True, 0.5)
    """

    step: int
    path: Path
    sound: bool
    metric: float | None = None


def find_checkpoints(root: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The steps below ``root``, in ascending order; none if there is no such folder.

    Only this process looks, and it does not read the contents of the files. A step that another job deletes
    meanwhile is left out. Whether there is one to go on with, `load_checkpoint` finds out for all ranks: it
    raises `CheckpointNotFoundError` if not.

    Args:
        root: Root of all steps.

    Raises:
        OSError: If this process may open no more files, or may not open those of a step.

    Example:
        >>> for step in (1, 2):
        ...     saved = fs.save_checkpoint("ckpt", step, model=model)
        >>> [(info.step, info.sound) for info in fs.find_checkpoints("ckpt")]
        [(1, True), (2, True)]
    """
    found = [
        CheckpointInfo(step, path, not problems, manifest.metric if manifest else None)
        for step, path in step_folders(full_path(root))
        for manifest, problems in [examine(path, hashes=False, headers=False)]
    ]
    there = [info for info in found if info.sound or info.path.exists()]
    # Another job deletes a step when it has saved a newer one, which the listing may lack.
    return there if there or not found else find_checkpoints(root)


def verify_checkpoint(path: str | os.PathLike[str]) -> list[str]:
    """Read one step completely and report what is wrong with it.

    Args:
        path: Folder of the step.

    Returns:
        Problems, each of which names its file; empty if the checkpoint is exactly what was written.

    Example:
        >>> saved = fs.save_checkpoint("ckpt", 1, model=model)
        >>> fs.verify_checkpoint("ckpt/step-1")
        []
        >>> (saved.path / "shards" / "00000.safetensors").unlink()
        >>> print(*fs.verify_checkpoint("ckpt/step-1"))
        step-1/shards/00000.safetensors is missing
    """
    return examine(full_path(path), hashes=True)[1]


def note_loaded(folder: Path, step: int) -> None:
    """A run that goes on from a step goes on with those before it."""
    before = {number for number, _ in step_folders(folder.parent) if number <= step}
    _own_steps.setdefault(folder.parent.resolve(), set()).update(before)


def prune(root: Path, *, keep_last: int | None, keep_best: int, just_saved: int) -> None:
    """Delete this run's sound steps except the newest ``keep_last`` and the best ``keep_best``.

    The step that was just saved is kept and counts as the newest. Later ones, and those that this run has
    neither saved nor gone on from, are another run's: they do not count and are not deleted. Damaged steps
    neither, since someone may want to examine them. Of two steps with equal metrics the newer one is better.
    Deletions are logged as warnings, which Python prints by default. A failure to list or delete steps is
    only a warning: the new checkpoint is valid.

    Args:
        root: Root of all steps.
        keep_last: Number of the newest steps to keep; None deletes nothing.
        keep_best: Number of the steps with the lowest metric to keep beside them.
        just_saved: Number of the step that was just saved.
    """
    own = _own_steps.setdefault(root.resolve(), set())
    own.add(just_saved)
    if keep_last is None:
        return
    try:
        found = find_checkpoints(root)
    except OSError as error:
        warn_caller(f"could not look at the steps below {root}; none was deleted: {error}")
        return
    sound = [info for info in found if info.sound and info.step in own and info.step <= just_saved]
    others = [info for info in sound if info.step != just_saved]
    measured = [info for info in sound if info.metric is not None]
    best = sorted(measured, key=lambda info: (info.metric, -info.step))[:keep_best]
    kept = {info.step for info in [*others[max(0, len(others) - (keep_last - 1)) :], *best]}
    surplus = [info.path for info in others if info.step not in kept and not info.path.is_symlink()]
    deleted = [path.name for path in surplus if _delete(root, path)]
    if deleted:
        _logger.warning(
            "keep_last=%d, keep_best=%d%s: deleted %s from %s",
            *(keep_last, keep_best),
            " (no step was saved with a metric=, so none is the best)" if keep_best and not measured else "",
            *(", ".join(deleted), root),
        )


def _delete(root: Path, path: Path) -> bool:
    """Delete a step; False, with a warning, if that fails."""
    doomed = temporary_beside(root / f"pruned-{path.name}")
    try:
        os.rename(path, doomed)  # renamed first, so that no folder with a step's name is half deleted
        shutil.rmtree(doomed)
    except OSError as error:
        warn_caller(f"could not delete the old checkpoint {path}: {error}")
        return False
    return True

"""Preparing the root, the folder of all steps, for a new step."""

import functools
import os
from pathlib import Path

from fsdp_sft._process.callers import warn_caller
from fsdp_sft._tensors.disk import renames_whole, sweep_all
from fsdp_sft.dcp_io import in_use
from fsdp_sft.dcp_io.steps import step_folder, step_folders
from fsdp_sft.dcp_io.verify import verify_folder
from fsdp_sft.errors import CheckpointExistsError


def prepare_root(root: Path, step: int) -> None:
    """Reserve ``root`` for this job, delete what killed jobs have left, and check that the step can be saved.

    Only rank 0 calls this.

    Raises:
        CheckpointInUseError: If another job saves there.
        CheckpointExistsError: If the step exists and is sound.
    """
    target = step_folder(root, step)
    root.mkdir(parents=True, exist_ok=True)
    in_use.take(root)
    _say_if_copied(root)
    sweep_all(root)
    if os.path.lexists(target) and not verify_folder(target, hashes=True):
        raise CheckpointExistsError(
            f"{target} is there and sound; a committed step is never overwritten. To go on from an earlier "
            "run, call load_checkpoint before the first step and count on from there; for a new run, choose "
            "another folder or move the old one away"
        )
    newer = [number for number, _ in step_folders(root) if number > step]
    if newer:
        warn_caller(
            f"{target} is saved beside newer steps ({newer[:5]}). If training went back to an earlier one, "
            "move those away: the next start resumes from the newest, and keep_last leaves them"
        )


@functools.cache
def _say_if_copied(root: Path) -> None:
    """Warn, at the first save below a root, if its file system renames a folder by copying it."""
    if not renames_whole(root):
        warn_caller(
            f"the file system of {root} copies a folder to rename it, so a step is there by part for a time. "
            "Loading and pruning compare files with the manifest and pass such a step over, and a save is "
            "acknowledged when all of it is there; other programs that look at steps should wait for that"
        )

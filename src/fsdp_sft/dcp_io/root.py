"""The folder of all steps, made ready for one more."""

import os
import warnings
from pathlib import Path

from fsdp_sft._disk import sweep_all
from fsdp_sft.dcp_io import in_use
from fsdp_sft.dcp_io.steps import step_folder, step_folders
from fsdp_sft.dcp_io.verify import verify_folder
from fsdp_sft.errors import CheckpointExistsError


def prepare_root(root: Path, step: int) -> None:
    """Make ``root`` this job's, sweep what killed jobs have left, and see that the step is free; by rank 0.

    Raises:
        CheckpointInUseError: If another job saves there.
        CheckpointExistsError: If the step is there and sound.
    """
    target = step_folder(root, step)
    root.mkdir(parents=True, exist_ok=True)
    in_use.take(root)
    sweep_all(root)
    if os.path.lexists(target) and not verify_folder(target, hashes=True):
        raise CheckpointExistsError(
            f"{target} is there and sound; a committed step is never overwritten. To go on from an earlier "
            "run, call load_checkpoint before the first step and count on from there; for a new run, choose "
            "another folder or move the old one away"
        )
    newer = [number for number, _ in step_folders(root) if number > step]
    if newer:
        warnings.warn(
            f"{target} is saved beside newer steps ({newer[:5]}). If training went back to an earlier one, "
            "move those away: the newest are what pruning keeps and what the next start resumes from",
            stacklevel=5,
        )

"""Choosing the step to load, the newest sound one, while another job may save and delete steps."""

import time
from pathlib import Path

from fsdp_sft._process.callers import warn_caller
from fsdp_sft._ranks.agree import all_reduce_max, this_rank, through_rank_0
from fsdp_sft.dcp_io.folder import open_folder
from fsdp_sft.dcp_io.manifest import MANIFEST_NAME, Manifest
from fsdp_sft.dcp_io.steps import is_step_folder, step_folders
from fsdp_sft.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

_DIFFERENT_ATTEMPTS, _PAUSE_SECONDS = 10, 0.1  # to see the same steps, since ranks look at different moments


def choose_step(path: Path, *, hashes: bool, fallback: bool) -> tuple[Path, Manifest] | None:
    """The folder of the step to load, and its manifest; None if it was deleted meanwhile: look again.

    Args:
        path: Folder of one step, or root of all steps.
        hashes: Whether to compare checksums.
        fallback: Whether an older step may be taken if the newest one is damaged.

    Raises:
        CheckpointNotFoundError: If there is no step.
        CheckpointCorruptError: If no step that may be taken is sound.
        CheckpointError: If ranks see different steps.

    Collective: all ranks; all return the same.
    """
    candidates = _same_candidates(path)[: None if fallback else 1]
    for folder in candidates:
        manifest, problems = open_folder(folder, hashes=hashes)
        if manifest is not None and manifest.model is not None:
            return folder, manifest
        if deleted_meanwhile(path, folder):
            return None
        summary = "; ".join(problems[:5]) or "it has no model in it"
        if len(candidates) > 1 and this_rank() == 0:
            warn_caller(f"checkpoint {folder} is not sound and is passed over: {summary}")
    raise CheckpointCorruptError(
        f"{folder} is not sound: {summary}"
        if len(candidates) == 1
        else f"none of the {len(candidates)} checkpoints in {folder.parent} is sound; the oldest: {summary}"
    )


def deleted_meanwhile(path: Path, folder: Path) -> bool:
    """Whether ``folder``, which was found below the root ``path``, is gone: another job has pruned it.

    Collective: all ranks.
    """
    return folder != path and all_reduce_max(not folder.exists()) > 0


def _same_candidates(path: Path) -> list[Path]:
    """Folders of the steps to try, newest first; the same on all ranks."""
    for attempt in range(_DIFFERENT_ATTEMPTS):
        found: list[Path] | None = through_rank_0(
            f"looking for checkpoints at {path}",
            lambda: _candidates(path),
            lambda everyone: everyone[0] if all(own == everyone[0] for own in everyone) else None,
        )
        if found is not None:
            return found
        if attempt < _DIFFERENT_ATTEMPTS - 1:
            time.sleep(_PAUSE_SECONDS)  # a step was saved or pruned while ranks listed them
    raise CheckpointError(
        f"ranks see different checkpoints at {path}; all of them must share its file system"
    )


def _candidates(path: Path) -> list[Path]:
    """Folders of the steps to try, newest first, as this rank sees them."""
    if is_step_folder(path) or (path / MANIFEST_NAME).exists():
        if not path.is_dir():
            raise CheckpointNotFoundError(f"there is no checkpoint at {path}")
        return [path]
    found = [folder for _, folder in step_folders(path)]
    if not found:
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {path}; expected folders named step-<number>, or such a folder itself"
        )
    return found[::-1]

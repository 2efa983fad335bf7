"""The state of an optimizer alone, in a folder: read without a step, written sharded, restored exactly."""

import os
import shutil

from torch import nn

from fsdp_sft._model.sharded import reshard
from fsdp_sft._ranks.agree import agreed, this_rank, through_rank_0
from fsdp_sft._tensors.disk import full_path, temporary_beside
from fsdp_sft._tensors.stored import StoredFolder
from fsdp_sft.dcp_io.content import FolderContent, OptimizerContent, describe_mesh
from fsdp_sft.dcp_io.folder import open_folder, write_folder
from fsdp_sft.dcp_io.inner_tensors import names_to_take_apart
from fsdp_sft.dcp_io.manifest import MANIFEST_NAME
from fsdp_sft.dcp_io.optimizer_content import Optimizers, optimizer_content, with_inner_tensors
from fsdp_sft.dcp_io.optimizer_load import apply_optimizer, check_optimizer
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
)


def save_optimizer_state(model: nn.Module, optimizer: Optimizers, path: str | os.PathLike[str]) -> None:
    """Write an optimizer's state to a folder: one safetensors file per rank, and JSON for the rest.

    The optimizer is only read, so a fresh one stays fresh and gradients stay where they are. An earlier state
    at ``path`` is replaced once the new one is complete.

    Args:
        model: Model whose parameters the optimizer has.
        optimizer: Any optimizer whose tensors are 0-dim or have their parameter's shape; or a list of
            optimizers with disjoint parameters.
        path: Folder to write; its parent is made if it is not there.

    Raises:
        FileExistsError: If something other than an optimizer state is at ``path``.
        ValueError: If a parameter of the optimizer is not the model's.
        UnstorableStateError: If there is state that could not be loaded again.
        OSError: If writing fails on any rank; what was at ``path`` stays.

    Collective: all ranks.
    Memory: One local shard of a state tensor in CPU memory.

    Example:
        >>> result = fs.train_step(model, window, optimizer)
        >>> fs.save_optimizer_state(model, optimizer, "adamw")
        >>> sorted(file.name for file in Path("adamw").iterdir())
        ['INDEX.json', 'MANIFEST.json', 'shards']
    """
    reshard(model)
    target = full_path(path)
    aside = temporary_beside(target)
    prepared: list[OptimizerContent] = []

    def prepare() -> list[str]:
        prepared.append(optimizer_content(model, optimizer))
        return names_to_take_apart(prepared[0].tensors)

    def make_room(everyone: list[list[str]]) -> list[str]:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() or (
            target.is_dir() and os.listdir(target) and not (target / MANIFEST_NAME).exists()
        ):
            raise FileExistsError(f"{target} exists and is not a saved optimizer state; choose another path")
        return sorted(set().union(*everyone))

    to_take_apart = through_rank_0(f"preparing to save {target}", prepare, make_room)
    content = with_inner_tensors(prepared[0], to_take_apart)
    write_folder(target, FolderContent(None, describe_mesh(model), optimizer=content), aside=aside)
    if this_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)


def load_optimizer_state(model: nn.Module, optimizer: Optimizers, path: str | os.PathLike[str]) -> None:
    """Load a saved state into an optimizer, fresh or not, at any world size and mesh.

    Groups are matched by the names of their parameters. Hyperparameters come from the file, except those that
    choose an implementation (``foreach``, ``fused``, ``capturable``, ``differentiable``).

    Args:
        model: Model whose parameters the optimizer has.
        optimizer: Optimizer of the class that was saved, with the same parameters in the same groups; or a
            list of all optimizers that were saved together, in any order.
        path: Folder that ``save_optimizer_state`` wrote, or one step of ``save_checkpoint``.

    Raises:
        CheckpointNotFoundError: If there is nothing at ``path``.
        CheckpointCorruptError: If a file is damaged; model and optimizer are untouched.
        CheckpointMismatchError: If the state is of another optimizer; model and optimizer are untouched. Or
            if the optimizer has not taken everything that was read.

    Collective: all ranks.
    Memory: The state, and a buffer of 1 MiB (for an accelerator two of 8 MiB) for each of at most 4 threads.

    Example:
        >>> result = fs.train_step(model, window, optimizer)
        >>> fs.save_optimizer_state(model, optimizer, "adamw")
        >>> fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
        >>> fs.load_optimizer_state(model, fresh, "adamw")
        >>> fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        True
    """
    reshard(model)
    folder = full_path(path)
    with agreed(f"looking for {folder}"):
        if not folder.is_dir():
            raise CheckpointNotFoundError(f"there is no optimizer state at {folder}")
    manifest, problems = open_folder(folder, hashes=True)
    if manifest is None:
        raise CheckpointCorruptError(f"{folder} is not sound: {'; '.join(problems[:5])}")
    with agreed(f"checking the optimizer against {folder}"):
        check_optimizer(manifest, model, optimizer)
    with agreed(f"reading {folder}"):
        apply_optimizer(manifest, model, optimizer, StoredFolder(folder))

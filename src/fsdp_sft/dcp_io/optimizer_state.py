"""An optimizer's state by parameter name: read without a step, written sharded, put back exactly."""

import os
import shutil
from pathlib import Path

from torch import nn

from fsdp_sft._agree import agreed, this_rank, through_rank_0
from fsdp_sft._disk import TensorReader, temporary_beside
from fsdp_sft._late import settle
from fsdp_sft.dcp_io.folder import FolderContent, describe_mesh, open_folder, write_folder
from fsdp_sft.dcp_io.inner_tensors import names_to_take_apart
from fsdp_sft.dcp_io.manifest import MANIFEST_NAME
from fsdp_sft.dcp_io.optimizer_content import (
    OptimizerContent,
    Optimizers,
    optimizer_content,
    with_inner_tensors,
)
from fsdp_sft.dcp_io.optimizer_load import apply_optimizer, check_optimizer
from fsdp_sft.distributed import reshard
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
)


def save_optimizer_state(model: nn.Module, optimizer: Optimizers, path: str | os.PathLike[str]) -> None:
    """Write an optimizer's state to a folder: one safetensors file per rank, JSON for the rest.

    The optimizer is only read: a fresh one, or one with gradients pending, stays as it is. What is saved at
    ``path`` already is replaced once the new state is complete.

    Args:
        model: The model whose parameters the optimizer has.
        optimizer: Any optimizer whose tensors are 0-dim or have their parameter's shape; or a list of
            several, each over parameters of its own.
        path: The folder; its parent is made.

    Raises:
        FileExistsError: If there is something else than an optimizer state at ``path``.
        ValueError: If a parameter of the optimizer is not the model's.
        UnstorableStateError: If there is state that could not be given back.
        OSError: If writing fails on any rank; what was at ``path`` stays.

    Collective: all ranks.
    Memory: One local shard of a state tensor in CPU memory.
    """
    settle(model)
    reshard(model)
    target = Path(path).absolute()
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
    write_folder(
        target,
        FolderContent(None, describe_mesh(model), optimizer=content.tensors, optimizer_info=content.info),
        aside=aside,
    )
    if this_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)


def load_optimizer_state(model: nn.Module, optimizer: Optimizers, path: str | os.PathLike[str]) -> None:
    """Put a saved state back into an optimizer, fresh or not, at any world size and mesh.

    Groups are matched by the names of their parameters; hyperparameters come from the file, except those
    that choose an implementation (``foreach``, ``fused``, ``capturable``, ``differentiable``).

    Args:
        model: The model whose parameters the optimizer has.
        optimizer: Of the class that was saved, over the same parameters in the same groups; or all of several
            as a list, in any order.
        path: What ``save_optimizer_state`` wrote, or one step of ``save_checkpoint``.

    Raises:
        CheckpointNotFoundError: If there is nothing at ``path``.
        CheckpointCorruptError: If a file is damaged; model and optimizer are untouched.
        CheckpointMismatchError: If the state is of another optimizer; both are untouched. Or if the optimizer
            does not take what was read.

    Collective: all ranks.
    Memory: The state, and a 16 MiB buffer.
    """
    reshard(model)
    folder = Path(path).absolute()
    with agreed(f"looking for {folder}"):
        if not folder.is_dir():
            raise CheckpointNotFoundError(f"there is no optimizer state at {folder}")
    manifest, problems = open_folder(folder, hashes=True)
    if manifest is None:
        raise CheckpointCorruptError(f"{folder} is not sound: {'; '.join(problems[:5])}")
    with agreed(f"checking the optimizer against {folder}"):
        check_optimizer(manifest, model, optimizer)
    with agreed(f"reading {folder}"), TensorReader(folder) as reader:
        apply_optimizer(manifest, model, optimizer, reader)

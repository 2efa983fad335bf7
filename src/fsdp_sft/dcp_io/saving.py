"""One save of a step, in phases that all ranks run together."""

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn

from fsdp_sft._compat.modules import is_wrapper_subclass
from fsdp_sft._model.adapters import refuse_merged
from fsdp_sft._model.named import parameter_names
from fsdp_sft._model.sharded import reshard
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.codec import dumps, encode
from fsdp_sft._process.streams import host_buffer
from fsdp_sft._ranks.agree import agreed, difference, tell, world_size
from fsdp_sft._tensors.disk import read_bytes, sweep, write_bytes
from fsdp_sft.dcp_io.background import wait_for_last
from fsdp_sft.dcp_io.folder import new_folder_beside, verify_folder, write_folder
from fsdp_sft.dcp_io.manifest import (
    TRAIN_STATE_NAME,
    Manifest,
    checked_size,
    encode_tensors,
    step_folder,
    step_folders,
)
from fsdp_sft.dcp_io.model_state import stored_model
from fsdp_sft.dcp_io.optimizer_content import Optimizers, as_list, optimizer_content, parts_inside
from fsdp_sft.dcp_io.parts import Part, parts_of
from fsdp_sft.dcp_io.rank_files import rank_parts
from fsdp_sft.dcp_io.retention import prune
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointInUseError,
)
from fsdp_sft.shard.packing import packed_digest

# The lock by which only one job at a time saves below a root.
#
# Two jobs with one root would delete each other's unfinished folders, and prune each other's steps. The first
# save locks a file in the root; the system unlocks it when the process ends, however it ends.

LOCK, OWNER = FILES = (".in-use.lock", ".in-use.txt")  # the second says in words who has the first

# By root: the lock, this process, and the number of the file.
_held: dict[Path, tuple[FileLock, tuple[int, int]]] = {}


def reserve(root: Path) -> None:
    """Reserve ``root`` for the saves of this process until it ends, unless it is reserved already.

    Raises:
        CheckpointInUseError: If another job saves there.
    """
    root = root.resolve()
    file = root / LOCK
    if root in _held and file.exists() and _held[root][1] == (os.getpid(), file.stat().st_ino):
        return
    # A process that was forked has its parent's entry, and a folder that was made anew another file.
    lock = FileLock(file, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        owner = "another job"
        with suppress(CheckpointCorruptError):
            owner = read_bytes(root / OWNER, 1000).decode(errors="replace")
        raise CheckpointInUseError(
            f"{root} is in use by {owner}: one job at a time may save below a root. Give this job another "
            "folder, or end the other one"
        ) from None
    _held[root] = lock, (os.getpid(), file.stat().st_ino)
    number = os.environ.get("SLURM_JOB_ID")
    job = f", Slurm job {number}" if number else ""
    (root / OWNER).unlink(missing_ok=True)
    write_bytes(root / OWNER, f"process {os.getpid()} on {socket.gethostname()}{job}".encode())


# A copy of what this rank writes: taken while training waits, and written while it continues.


class Snapshot:
    """Host memory for one copy, which all asynchronous saves reuse.

    The first copy is slow, because its memory is new: 0.6 GiB/s were measured, and 12.5 GiB/s from the second
    copy on. For an accelerator the memory is pinned.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, parts: list[Part]) -> list[Part]:
        """A copy of ``parts`` that does not change with the live tensors; valid until the next call.

        Memory: This rank's parts, once.
        """
        used: dict[str, torch.Tensor] = {}
        for part in parts:
            buffer = self._buffers.get(part.name)
            if buffer is None or buffer.shape != part.local.shape or buffer.dtype != part.local.dtype:
                buffer = host_buffer(part.local.shape, part.local.dtype, part.local.device)
            used[part.name] = buffer.copy_(part.local, non_blocking=True)
        self._buffers = used  # buffers of tensors that the model no longer has are freed
        for device in {part.local.device for part in parts}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return [part._replace(local=used[part.name]) for part in parts]


# Preparing the root, the folder of all steps, for a new step.


def prepare_root(root: Path, step: int) -> None:
    """Reserve ``root`` for this job, delete what killed jobs have left, and check that the step can be saved.

    Only rank 0 calls this.

    Raises:
        CheckpointInUseError: If another job saves there.
        CheckpointExistsError: If the step exists and is sound.
    """
    target = step_folder(root, step)
    root.mkdir(parents=True, exist_ok=True)
    reserve(root)
    sweep(root)
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


_logger = logging.getLogger(__name__)
# Memory that all asynchronous saves use, since only one runs at a time.
_snapshot = Snapshot()


def prepare_save(
    root: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: Optimizers | None,
    train_state: Any,
    rank_state: Any,
    metric: float | None,
    keep_last: int | None,
    keep_best: int,
    include_base: bool,
    in_background: bool,
) -> Callable[[], None]:
    """List what a step holds, take the values, and make its folder; returns the function that writes it.

    Args:
        root: Folder of all steps, an absolute path.
        step: Number of the step.
        model: Model to save.
        optimizer: Its optimizer, or several; None saves none.
        train_state: State that all ranks share.
        rank_state: State of this rank.
        metric: Metric of the step, or None.
        keep_last: Number of the newest steps to keep; None deletes none.
        keep_best: Number of the best ones to keep beside them.
        include_base: Whether the bytes of packed weights are written.
        in_background: Whether training goes on while the step is written, so that values are copied.

    Collective: all ranks, which raise the same error; so is what is returned.
    """
    target, started = step_folder(root, step), time.perf_counter()
    with agreed(f"preparing to save {target}", _agree_on) as decision:
        wait_for_last()
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be an integer, 0 or more, got {step!r}")
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, or None to keep every step, got {keep_last!r}")
        refuse_merged(model, "saving a checkpoint")
        reshard(model)
        given = as_list(optimizer) if optimizer is not None else []
        info, states = optimizer_content(given, parameter_names(model))
        small = {}
        if train_state is not None:
            as_json = dumps(encode(train_state, "train_state"), canonical=False)
            small[TRAIN_STATE_NAME] = checked_size(as_json, "train_state")
        own = rank_parts(rank_state)
        in_subclasses = [name for name, tensor in states.items() if is_wrapper_subclass(tensor)]
        decision.told = {"target": str(target), "metric": metric}, in_subclasses
    apart: list[str] = decision.result
    inside, inner = parts_inside(info, states, apart) if apart else ({}, [])
    packed_digest(model)

    def make_folder(digests: list[str]) -> Path:
        prepare_root(root, step)
        return new_folder_beside(target, manifest, digests)

    with agreed(f"making a folder for {target}", make_folder) as decision:
        content, settings = stored_model(model, with_base=include_base)
        stored, parts = parts_of("model", content.tensors)
        plain = {name: state for name, state in states.items() if name not in apart}
        stored_states, state_parts = parts_of("optimizer", plain)
        manifest = Manifest(
            step=step,
            world_size=world_size(),
            model=stored,
            ties=content.ties,
            optimizer=None if optimizer is None else {**stored_states, **inside},
            optimizer_info=info,
            metric=metric,
        )
        parts = [*parts, *state_parts, *inner, *own]
        if in_background:
            parts = _snapshot.take(parts)
        decision.told = hashlib.sha256(dumps(encode_tensors(manifest))).hexdigest()
    temporary: Path = decision.result

    def write() -> None:
        then = partial(prune, root, keep_last=keep_last, keep_best=keep_best, just_saved=step)
        write_folder(temporary, target, manifest, parts, {**small, **settings}, then)
        message, ranks = "saved step %d on %d ranks in %.2f s: %s", world_size()
        tell(_logger, message, step, ranks, time.perf_counter() - started, target)

    return write


def _agree_on(everyone: list[tuple[dict[str, Any], list[str]]]) -> list[str]:
    """Refuse unequal arguments; return the names of the states that are in a tensor subclass on some rank."""
    apart = difference([(rank, told) for rank, (told, _) in enumerate(everyone)])
    if apart:
        raise CheckpointError(f"ranks were told to save different things: {apart}")
    return sorted({name for _, names in everyone for name in names})

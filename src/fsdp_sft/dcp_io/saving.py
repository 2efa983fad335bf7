"""One save of a step, in phases that all ranks run together."""

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn

from fsdp_sft._model.adapters import refuse_merged
from fsdp_sft._model.sharded import reshard
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.codec import dumps, encode
from fsdp_sft._process.streams import host_buffer
from fsdp_sft._ranks.agree import difference, tell, through_rank_0, world_size
from fsdp_sft._tensors.disk import read_bytes, sweep_all, unsound_beside, write_bytes
from fsdp_sft.dcp_io.background import wait_for_last
from fsdp_sft.dcp_io.content import FolderContent, Parts, describe_mesh, own_parts
from fsdp_sft.dcp_io.folder import new_folder_beside, verify_folder, write_folder
from fsdp_sft.dcp_io.inner_tensors import names_to_take_apart
from fsdp_sft.dcp_io.manifest import checked_size, step_folder, step_folders
from fsdp_sft.dcp_io.model_state import adapter_settings, packed_settings, stored_tensors
from fsdp_sft.dcp_io.optimizer_content import Optimizers, optimizer_content, with_inner_tensors
from fsdp_sft.dcp_io.rank_files import rank_content
from fsdp_sft.dcp_io.retention import prune
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointInUseError,
)
from fsdp_sft.shard.packing import packed_digest, packed_weights

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
        raise _in_use(root) from None
    _held[root] = lock, (os.getpid(), file.stat().st_ino)
    number = os.environ.get("SLURM_JOB_ID")
    job = f", Slurm job {number}" if number else ""
    (root / OWNER).unlink(missing_ok=True)
    write_bytes(root / OWNER, f"process {os.getpid()} on {socket.gethostname()}{job}".encode())


def release_all() -> None:
    """Release all roots of this process."""
    while _held:
        _held.popitem()[1][0].release(force=True)


def _in_use(root: Path) -> CheckpointInUseError:
    """The error that names the job which saves below a root."""
    try:
        owner = read_bytes(root / OWNER, 1000).decode(errors="replace")
    except CheckpointCorruptError:
        owner = "another job"
    return CheckpointInUseError(
        f"{root} is in use by {owner}: one job at a time may save below a root. Give this job another "
        "folder, or end the other one"
    )


# A copy of what this rank writes: taken while training waits, and written while it continues.


class Snapshot:
    """Host memory for one copy, which all asynchronous saves reuse.

    The first copy is slow, because its memory is new: 0.6 GiB/s were measured, and 12.5 GiB/s from the second
    copy on. For an accelerator the memory is pinned.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, parts: Parts) -> Parts:
        """A copy of ``parts`` that does not change with the live tensors; valid until the next call.

        Memory: This rank's parts, once.
        """
        used: dict[str, torch.Tensor] = {}
        devices: set[torch.device] = set()
        for key, part in parts.items():
            used[key] = self._buffer(key, part.tensor)
            used[key].copy_(part.tensor, non_blocking=True)
            devices.add(part.tensor.device)
        self._buffers = used  # buffers of tensors that the model no longer has are freed
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return {key: replace(part, tensor=used[key]) for key, part in parts.items()}

    def _buffer(self, key: str, live: torch.Tensor) -> torch.Tensor:
        """The buffer of the last save if it fits, else a new one."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != live.shape or buffer.dtype != live.dtype:
            buffer = host_buffer(live.shape, live.dtype, live.device)
        return buffer


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


_logger = logging.getLogger(__name__)
# Memory that all asynchronous saves use, since only one runs at a time.
_snapshot = Snapshot()


class Save:
    """A save in three phases, ``prepare``, ``copy`` and ``write``, whose errors are raised on all ranks.

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
    """

    def __init__(
        self,
        root: Path,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizers | None,
        train_state: Mapping[str, Any] | None,
        rank_state: Mapping[str, Any] | None,
        metric: float | None,
        keep_last: int | None,
        keep_best: int,
        include_base: bool,
    ) -> None:
        self.root, self.step, self.target = root, step, step_folder(root, step)
        self._model, self._optimizer, self._metric = model, optimizer, metric
        self._train_state, self._rank_state = train_state, rank_state
        self._keep_last, self._keep_best, self._include_base = keep_last, keep_best, include_base
        self._started = time.perf_counter()
        self._content: FolderContent
        self._parts: Parts
        self._temporary: Path

    def prepare(self) -> None:
        """Collect what this rank contributes, after an earlier save has ended; ranks compare arguments.

        Collective: all ranks.
        """
        if packed_weights(self._model) is not None:
            reshard(self._model)
            packed_digest(self._model)
        apart = through_rank_0(f"preparing to save {self.target}", self._collect, _agree_on)
        if apart and self._content.optimizer is not None:
            whole = self._content.optimizer
            self._content = replace(self._content, optimizer=with_inner_tensors(whole, apart))

    def _collect(self) -> tuple[dict[str, Any], list[str]]:
        """Arguments that ranks compare, and names of the states in tensor subclasses."""
        wait_for_last()
        refuse_merged(self._model, "saving a checkpoint")
        reshard(self._model)
        _check_numbers(self.step, self._keep_last, self._keep_best)
        content = self._content = _content(
            self.step,
            self._metric,
            self._model,
            self._optimizer,
            self._train_state,
            self._rank_state,
            self._include_base,
        )
        states = content.optimizer.tensors if content.optimizer is not None else {}
        return {"target": str(self.target), "metric": self._metric}, names_to_take_apart(states)

    def copy(self, *, in_background: bool) -> None:
        """Take the values, as copies if they are written in the background. Rank 0 makes the folder.

        Collective: all ranks.
        """

        def take() -> str:
            digest = self._content.tensors_digest()
            self._parts = own_parts(self._content)
            if in_background:
                self._parts = _snapshot.take(self._parts)
            return digest

        def make_folder(digests: list[str]) -> Path:
            prepare_root(self.root, self.step)
            return new_folder_beside(self.target, self._content, digests)

        self._temporary = through_rank_0(f"copying for {self.target}", take, make_folder)

    def write(self) -> None:
        """Write everything, give the step its name, and delete old steps.

        Other ranks wait for the deletion, since they might list the root meanwhile.

        Collective: all ranks.
        """
        write_folder(
            self.target,
            self._content,
            aside=unsound_beside(self.target),
            parts=self._parts,
            temporary=self._temporary,
            then=partial(
                prune,
                self.root,
                keep_last=self._keep_last,
                keep_best=self._keep_best,
                just_saved=self.step,
            ),
        )
        seconds = time.perf_counter() - self._started
        tell(
            _logger, "saved step %d on %d ranks in %.2f s: %s", self.step, world_size(), seconds, self.target
        )


def _check_numbers(step: int, keep_last: int | None, keep_best: int) -> None:
    """Refuse numbers that are out of range."""
    if type(step) is not int or step < 0:
        raise ValueError(f"step must be an integer, 0 or more, got {step!r}")
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ValueError(f"keep_last must be at least 1, or None to keep every step, got {keep_last!r}")
    if type(keep_best) is not int or keep_best < 0:
        raise ValueError(f"keep_best must be an integer, 0 or more, got {keep_best!r}")


def _content(
    step: int,
    metric: float | None,
    model: nn.Module,
    optimizer: Optimizers | None,
    train_state: Mapping[str, Any] | None,
    rank_state: Mapping[str, Any] | None,
    include_base: bool,
) -> FolderContent:
    """What this rank contributes to a save."""
    tensors = stored_tensors(model, with_base=include_base)
    return FolderContent(
        step=step,
        mesh=describe_mesh(model),
        metric=None if metric is None else float(metric),
        model=tensors,
        optimizer=optimizer_content(model, optimizer) if optimizer is not None else None,
        train_state=checked_size(_as_json(train_state), "train_state"),
        rank_content=rank_content(rank_state),
        settings=adapter_settings(model) | packed_settings(model, with_base=include_base),
    )


def _as_json(train_state: Any) -> bytes:
    """The bytes of ``train_state.json``."""
    try:
        return dumps(encode(train_state, "train_state"), canonical=False)
    except RecursionError:
        raise TypeError("train_state is nested too deeply to be stored") from None


def _agree_on(everyone: list[tuple[dict[str, Any], list[str]]]) -> list[str]:
    """Refuse unequal arguments; return the names of the states that are in a tensor subclass on some rank."""
    apart = difference([(rank, told) for rank, (told, _) in enumerate(everyone)])
    if apart:
        raise CheckpointError(f"ranks were told to save different things: {apart}")
    return sorted({name for _, names in everyone for name in names})

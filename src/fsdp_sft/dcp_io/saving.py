"""One save of a step, in phases that all ranks run together."""

import atexit
import hashlib
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import nn

from fsdp_sft._compat.modules import is_wrapper_subclass
from fsdp_sft._model.published import model_tensors
from fsdp_sft._model.view import parameter_names, reshard
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.codec import dumps, encode
from fsdp_sft._process.streams import host_buffer
from fsdp_sft._ranks.agree import agreed, agreeing_over, difference, tell, world_size
from fsdp_sft._tensors.disk import read_bytes, sweep, write_bytes
from fsdp_sft.dcp_io.folder import examine, new_folder_beside, write_folder
from fsdp_sft.dcp_io.manifest import (
    Manifest,
    encode_tensors,
    per_optimizer,
    step_folder,
    step_folders,
)
from fsdp_sft.dcp_io.model_state import packed_base, stored_model, total_sums
from fsdp_sft.dcp_io.optimizers import Optimizers, as_list, optimizer_content, parts_inside
from fsdp_sft.dcp_io.parts import Part, checked_size, parts_of, rank_parts
from fsdp_sft.dcp_io.retention import prune
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointInUseError,
)

# The lock by which only one job at a time saves below a root.
#
# Two jobs with one root would delete each other's unfinished folders, and prune each other's steps. The first
# save locks a file in the root; the system unlocks it when the process ends, however it ends.

LOCK, OWNER = FILES = (".in-use.lock", ".in-use.txt")  # the second says in words who has the first

# Locks that this process holds, by the process, the device and the number of the file: a process that was
# forked has its parent's entries, a folder that was made anew another file, a renamed one the same.
_held: dict[tuple[int, int, int], FileLock] = {}


def reserve(root: Path) -> None:
    """Reserve ``root`` for the saves of this process until it ends, unless it is reserved already.

    Raises:
        CheckpointInUseError: If another job saves there.
    """
    root = root.resolve()
    file = root / LOCK
    if file.exists() and _identity(file) in _held:
        return
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
    _held[_identity(file)] = lock
    number = os.environ.get("SLURM_JOB_ID")
    job = f", Slurm job {number}" if number else ""
    (root / OWNER).unlink(missing_ok=True)
    write_bytes(root / OWNER, f"process {os.getpid()} on {socket.gethostname()}{job}".encode())


def _identity(file: Path) -> tuple[int, int, int]:
    stat = file.stat()
    return os.getpid(), stat.st_dev, stat.st_ino


# A copy of what this rank writes: taken while training waits, and written while it continues.

_buffers: dict[str, torch.Tensor] = {}  # host memory of the last copy, by name


def snapshot(parts: list[Part]) -> list[Part]:
    """A copy of ``parts`` that does not change with the live tensors; valid until the next call.

    All copies use the same host memory, as only one save runs at a time. The first is slow, because its
    memory is new: 0.6 GiB/s were measured, and 12.5 GiB/s from the second on. For an accelerator the memory
    is pinned.

    Memory: This rank's parts, once.
    """
    used: dict[str, torch.Tensor] = {}
    for part in parts:
        buffer = _buffers.get(part.name)
        if buffer is None or buffer.shape != part.local.shape or buffer.dtype != part.local.dtype:
            buffer = host_buffer(part.local.shape, part.local.dtype, part.local.device)
        used[part.name] = buffer.copy_(part.local, non_blocking=True)
    _buffers.clear()  # buffers of tensors that the model no longer has are freed
    _buffers.update(used)
    for device in {part.local.device for part in parts}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return [part._replace(local=used[part.name]) for part in parts]


# Saving in a thread, one save at a time. The next call that waits for the save raises its error.


class BackgroundSave(threading.Thread):
    """A save in a thread, which begins at once and for which a program that ends waits.

    Args:
        work: Function that saves. Its collectives use ``group``.
        group: Process group that nothing else uses while the thread runs; None in a single process.

    Attributes:
        error: Error with which the save has ended, until it is raised; None if there is none.
    """

    def __init__(self, work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
        global _last
        super().__init__(name="fsdp_sft-save")
        self._work, self._agreed_over = work, group
        self.error: BaseException | None = None
        _last = self
        self.start()

    def wait(self) -> None:
        """Return when the save is committed; raise its error if it has one, but only once."""
        global _last
        self.join()
        if _last is self:
            _last = None
        error, self.error = self.error, None
        if error is not None:
            raise error

    def run(self) -> None:
        """Save, and keep an error for whoever waits for the save."""
        try:
            with agreeing_over(self._agreed_over):
                self._work()
        except BaseException as error:
            self.error = error
        finally:
            del self._work  # it refers to the model, which could then not be freed
            # gloo's threads end with the group, for which the end of the program is too late.
            self._agreed_over = None


_last: BackgroundSave | None = None


def wait_for_last() -> None:
    """Return when no save is running; raise the error of the last one unless it has been raised already."""
    if _last is not None:
        _last.wait()


def join_last() -> None:
    """Return when no save is running; an error of the last one is kept for ``wait_for_last``."""
    if _last is not None:
        _last.join()


@atexit.register
def _say_so_at_exit() -> None:
    """Print the error of a last save that failed, and end the program with exit code 1."""
    if _last is not None and _last.error is not None:
        print("fsdp_sft: the last asynchronous save failed; the step before it stands.", file=sys.stderr)
        traceback.print_exception(_last.error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the only way in which an exit handler can change the exit code


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
    if os.path.lexists(target) and not examine(target, hashes=True)[1]:
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
        for name, value, least in (
            ("step", step, 0),
            ("keep_last (None keeps every step)", 1 if keep_last is None else keep_last, 1),
            ("keep_best", keep_best, 0),
        ):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer, {least} or more, got {value!r}")
        model = reshard(model)
        base = packed_base(model)
        names = parameter_names(model)
        content = model_tensors(model, "saving a checkpoint")
        info, states = optimizer_content([] if optimizer is None else as_list(optimizer), names)
        as_json = checked_size(dumps(encode(train_state, "train_state"), canonical=False), "train_state")
        in_subclasses = [name for name, tensor in states.items() if is_wrapper_subclass(tensor)]
        decision.told = {"target": str(target), "metric": metric}, in_subclasses, base.sums
    apart, totals = decision.result
    for one, own in per_optimizer(info, dict.fromkeys(apart)):
        if own:
            one["apart"] = [*own]

    def make_folder(digests: list[str]) -> Path:
        prepare_root(root, step)
        return new_folder_beside(target, manifest, digests)

    with agreed(f"making a folder for {target}", make_folder) as decision:
        content, settings = stored_model(content, base.fingerprint(totals), with_base=include_base)
        stored, parts = parts_of("model", content.tensors)
        of_rank = rank_parts(rank_state, parts_inside(states, apart, numbered="optimizers" in info))
        stored_states, state_parts = parts_of(
            "optimizer", {name: state for name, state in states.items() if name not in apart}
        )
        manifest = Manifest(
            step=step,
            world_size=world_size(),
            model=stored,
            ties=content.ties,
            optimizer=None if optimizer is None else stored_states,
            optimizer_info=info,
            metric=metric,
            train_state=as_json.decode(),
            settings=settings,
            files={},
        )
        parts = [*parts, *state_parts, *of_rank]
        if in_background:
            parts = snapshot(parts)
        decision.told = hashlib.sha256(dumps(encode_tensors(manifest))).hexdigest()
    temporary: Path = decision.result

    def write() -> None:
        then = partial(prune, root, keep_last=keep_last, keep_best=keep_best, just_saved=step)
        write_folder(temporary, target, manifest, parts, then)
        tell(
            _logger,
            "saved step %d on %d ranks in %.2f s: %s",
            step,
            world_size(),
            time.perf_counter() - started,
            target,
        )

    return write


def _agree_on(everyone: list[tuple[dict[str, Any], list[str], list[int]]]) -> tuple[list[str], list[int]]:
    """Refuse unequal arguments.

    Returns:
        (names of the states that are in a tensor subclass on some rank, sums over the base of all ranks).
    """
    apart = difference([(rank, told) for rank, (told, *_) in enumerate(everyone)])
    if apart:
        raise CheckpointError(f"ranks were told to save different things: {apart}")
    return (
        sorted({name for _, names, _ in everyone for name in names}),
        total_sums(sums for *_, sums in everyone),
    )

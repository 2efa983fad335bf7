"""Crash-safe checkpoints: a step exists complete and with checksums, or not at all."""

import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from fsdp_sft._model.sharded import give_memory
from fsdp_sft._model.view import record_of, reshard
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.generators import set_generator_states
from fsdp_sft._ranks.agree import (
    agreed,
    all_gather_objects,
    control_group,
    difference,
    tell,
    this_rank,
    through_rank_0,
    world_size,
)
from fsdp_sft._tensors.disk import full_path
from fsdp_sft._tensors.stored import StoredFolder
from fsdp_sft.dcp_io.folder import open_folder, read_tensors
from fsdp_sft.dcp_io.manifest import (
    MANIFEST_NAME,
    Manifest,
    decode_json,
    step_folder,
    step_folders,
    step_number,
)
from fsdp_sft.dcp_io.model_state import LoadedStep, match_model, packed_base, total_sums
from fsdp_sft.dcp_io.optimizers import Optimizers, apply_optimizer, match_optimizers
from fsdp_sft.dcp_io.parts import read_rank_content
from fsdp_sft.dcp_io.retention import note_loaded
from fsdp_sft.dcp_io.saving import BackgroundSave, join_last, prepare_save
from fsdp_sft.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError


def choose_step(path: Path, *, hashes: bool, fallback: bool) -> tuple[Path, Manifest] | None:
    """The folder of the step to load, and its manifest; None if it was deleted meanwhile: look again.

    Args:
        path: Folder of one step, or root of all steps.
        hashes: Whether to compare checksums.
        fallback: Whether an older step may be taken if the newest one is damaged.

    Raises:
        CheckpointNotFoundError: If there is no step.
        CheckpointCorruptError: If no step that may be taken is sound.

    Collective: all ranks; all return the same.
    """
    found = through_rank_0(f"looking for checkpoints at {path}", lambda: path, _candidates)
    candidates = found if fallback else found[:1]
    for folder in candidates:
        manifest, problems = open_folder(folder, hashes=hashes)
        if manifest is not None:
            return folder, manifest
        if deleted_meanwhile(path, folder):
            return None
        summary = "; ".join(problems[:5])
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
    return folder != path and any(all_gather_objects(not folder.exists()))


def _candidates(paths: list[Path]) -> list[Path]:
    """Folders of the steps to try, newest first, as rank 0 sees them.

    Args:
        paths: What each rank was told to load, in rank order.
    """
    apart = difference([(rank, {"path": str(path)}) for rank, path in enumerate(paths)])
    if apart:
        raise CheckpointError(f"ranks were told to load different things: {apart}")
    path = paths[0]
    found = [folder for _, folder in step_folders(path)]
    is_step = step_number(path) is not None and path.is_dir() and not found
    if is_step or (path / MANIFEST_NAME).exists():
        return [path]
    if not found:
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {path}; expected folders named step-<number>, or such a folder itself"
        )
    return found[::-1]


_logger = logging.getLogger(__name__)
_MOST_ATTEMPTS = 64  # to read a step before another job deletes it


@dataclass(frozen=True)
class SavedCheckpoint:
    """A save that has been started.

    Attributes:
        path: Folder of the step.
        blocked_seconds: Time for which training stood still on this rank because of the save, including the
            wait for an earlier asynchronous one.

    Example:
        >>> saved = fs.save_checkpoint("ckpt", 1, model=model, async_=True)
        >>> print(saved.path.name)
        step-1
        >>> saved.wait()  # now the step is on the disk
    """

    path: Path
    blocked_seconds: float
    _background: BackgroundSave | None = field(default=None, repr=False, compare=False)

    def wait(self) -> None:
        """Return when the checkpoint is committed; at once for a synchronous save.

        Raises:
            Exception: If an asynchronous save has failed: its error, the same on all ranks, unless a later
                save has raised it already.
        """
        if self._background is not None:
            self._background.wait()


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was loaded besides the model and the optimizer.

    Attributes:
        step: Number of the step.
        path: Folder of the step.
        train_state: The ``train_state`` that was passed to the save; None if there was none.
        rank_state: The ``rank_state`` that this rank passed to the save; None at another world size.
        world_size: Number of ranks that saved the step.

    Example:
        >>> saved = fs.save_checkpoint("ckpt", 1, model=model, train_state={"tokens": 4096})
        >>> loaded = fs.load_checkpoint("ckpt", model=model)
        >>> loaded.step, loaded.train_state, loaded.rank_state
        (1, {'tokens': 4096}, None)
    """

    step: int
    path: Path
    train_state: Any
    rank_state: Any
    world_size: int

    @cached_property
    def rank_states(self) -> tuple[Any, ...]:
        """The ``rank_state`` of every rank that saved, in rank order; read on first access.

        Raises:
            CheckpointError: If the step can no longer be read.
        """
        return tuple(read_rank_content(self.path, rank)[1] for rank in range(self.world_size))


def save_checkpoint(
    root: str | os.PathLike[str],
    step: int,
    *,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    train_state: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    async_: bool = False,
    keep_last: int | None = None,
    metric: float | None = None,
    keep_best: int = 0,
    include_base: bool = False,
) -> SavedCheckpoint:
    """Write ``root/step-<step>``: weights, optimizer, random number generators, and the caller's own state.

    Each rank writes its shards; of replicas, one does. The step appears under its name when every file is on
    the disk with its checksum in the manifest. Until then, and if anything fails on any rank, earlier steps
    are as they were. One job at a time saves below a root.

    Schedulers, scalers and samplers go into ``train_state`` by their ``state_dict()``.

    Args:
        root: Folder of all steps, on a file system that all ranks share; made if it is not there.
        step: Number of the step, 0 or more.
        model: The model, sharded or not, at any moment between two steps.
        optimizer: Its optimizer, or a list of optimizers with disjoint parameters; None saves none.
        train_state: State that all ranks share: nested dicts, lists, tuples, strings, numbers, booleans and
            None. Rank 0's is written.
        rank_state: State of this rank, such as a data loader's position; may hold CPU tensors and bytes.
            Another number of ranks gets it by ``LoadedCheckpoint.rank_states``.
        async_: Whether to copy everything to host memory and write it in a thread while training continues.
            Only one such save runs at a time: the next one waits for it. An error of the thread is raised on
            all ranks by the next save or by ``wait``; a program that ends without either prints it and exits
            with code 1. ``destroy_process_group`` does not interrupt the save.
        keep_last: Number of the newest sound steps to keep, this one included. Older ones are deleted, and a
            line of the log names them. Steps that this run has neither saved nor gone on from, and later
            ones than this, do not count and stay. None deletes nothing.
        metric: Metric of this step, lower being better, the same on all ranks. A value that is not finite
            counts as None, which is never the best.
        keep_best: Number of the steps with the lowest metric to keep beside the newest ``keep_last``.
        include_base: Whether the bytes of frozen weights that are kept packed (``frozen_dtype="nf4"``, for
            instance) are written too. By default a step has a fingerprint of them, and is resumed with the
            same base, loaded from wherever it lies. Frozen weights in a dtype are always written.

    Returns:
        The folder where the step is or will be, and how long training stood still.

    Raises:
        UnsupportedModelError: If adapters are merged into the model.
        CheckpointInUseError: If another job saves below ``root``. From its first save on, a root belongs to a
            job until the process of rank 0 ends.
        CheckpointExistsError: If that step exists and is sound. A damaged one is moved to
            ``.unsound-step-<step>-<id>``.
        TypeError: If ``train_state``, ``rank_state`` or an optimizer has a value that cannot be stored; the
            message names its key path.
        ValueError: If a number is out of range, or state that is no tensor takes more than 128 MiB.
        UnstorableStateError: If the model or an optimizer has state that could not be loaded again.
        CheckpointError: If ranks do not share the file system or were given different steps or metrics.
        OSError: If writing fails on any rank.

    Collective: all ranks; all raise the same error.
    Memory: One local shard of a tensor in CPU memory. An asynchronous save: a copy of all that this rank
        writes, which is kept for the next save.

    Example:
        >>> scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        >>> state = {"scheduler": scheduler.state_dict()}
        >>> saved = fs.save_checkpoint(
        ...     "ckpt", 1, model=model, optimizer=optimizer, train_state=state
        ... )
        >>> loaded = fs.load_checkpoint("ckpt", model=model, optimizer=optimizer)
        >>> scheduler.load_state_dict(loaded.train_state["scheduler"])
    """
    started, folder = time.perf_counter(), full_path(root)
    write = prepare_save(
        folder,
        step,
        model=model,
        optimizer=optimizer,
        train_state=train_state,
        rank_state=rank_state,
        metric=float(metric) if metric is not None and math.isfinite(metric) else None,
        keep_last=keep_last,
        keep_best=keep_best,
        include_base=include_base,
        in_background=async_,
    )
    background = None
    if async_:
        background = BackgroundSave(write, control_group(name="background") if world_size() > 1 else None)
    else:
        write()
    return SavedCheckpoint(step_folder(folder, step), time.perf_counter() - started, background)


def load_checkpoint(
    path_or_root: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    verify: bool = True,
    fallback: bool = True,
) -> LoadedCheckpoint:
    """Resume from a step: exactly at the same world size and mesh, resharded at another.

    Everything is checked on all ranks before the model or the optimizer is touched. Random number generators
    are restored if the world size is the same. If it is not, a warning says by how much a step of the
    optimizer has more or fewer rows with the same loader; ``windows(global_batch=)`` keeps their number.

    Args:
        path_or_root: Folder of one step, or root of all steps, of which the newest is taken.
        model: Model to load into, with the names, shapes and dtypes that were saved. On the meta device it
            gets memory, and its buffers that are in no file are computed as by ``load_weights``.
        optimizer: Its optimizer, or all of them as a list in any order, with the same parameters in the same
            groups; None loads none of their state, of which a later ``train_step`` warns.
        verify: Whether to compare every file's checksum, each file on one rank. False compares names, sizes
            and headers only.
        fallback: Whether a root's newest sound step is taken, with a warning about damaged newer ones. False
            requires the newest step to be sound. A step that another job deletes meanwhile (``keep_last``)
            does not count.

    Returns:
        Number and folder of the step, and the caller's own state.

    Raises:
        UnsupportedModelError: If adapters are merged into the model.
        CheckpointNotFoundError: If there is no checkpoint.
        CheckpointError: If ranks give different paths.
        CheckpointCorruptError: If the step is damaged, or with ``fallback`` every step.
        CheckpointMismatchError: If it is of another model or optimizer; the message lists the differences. Or
            if a module or an optimizer has not taken everything that it was given, which is checked at the
            end.
        ValueError: If the model is on the meta device, with buffers that belong in no file.

    Collective: all ranks; all raise the same error.
    Memory: The optimizer's state if it had none, and a buffer of 1 MiB (for an accelerator two of 8 MiB) for
        each of at most 4 threads; of quantised moments this rank's part once more, on the host.

    Example:
        >>> saved = fs.save_checkpoint("ckpt", 7, model=model, optimizer=optimizer)
        >>> loaded = fs.load_checkpoint("ckpt", model=model, optimizer=optimizer)
        >>> loaded.step  # the newest of all steps
        7
        >>> fs.load_checkpoint("ckpt/step-7", model=model).step  # without the optimizer
        7
    """
    started = time.perf_counter()
    join_last()  # a running save may be writing the step that is to be loaded
    model = reshard(model)
    path = full_path(path_or_root)
    for _ in range(_MOST_ATTEMPTS):
        found = choose_step(path, hashes=verify, fallback=fallback)
        if found is None:
            continue
        folder, manifest = found
        try:
            loaded = _load_step(folder, manifest, model, optimizer)
            note_loaded(folder, loaded.step)
            tell(
                _logger,
                "resumed in %.2f s from step %d, saved on %d ranks: %s",
                time.perf_counter() - started,
                loaded.step,
                loaded.world_size,
                folder,
            )
            return loaded
        except CheckpointCorruptError:
            if not deleted_meanwhile(path, folder):
                raise
    raise CheckpointError(f"the steps in {path} are deleted faster than they can be read")


def _load_step(
    folder: Path, manifest: Manifest, model: nn.Module, optimizer: Optimizers | None
) -> LoadedCheckpoint:
    """Load one step, in two phases: all ranks check everything before any of them reads.

    Collective: all ranks.
    """
    rng = rank_state = train_state = None
    with agreed(f"giving the model memory for {folder}", total_sums) as decision:
        give_memory(model)
        base = packed_base(model)
        decision.told = base.sums
    with agreed(f"checking the model against {folder}"):
        tensors, sources = match_model(folder, manifest, model, base.fingerprint(decision.result))
        optimizers = match_optimizers(folder, manifest, model, optimizer) if optimizer is not None else []
        train_state = decode_json(manifest.train_state)
        if manifest.world_size == world_size():
            rng, rank_state, _ = read_rank_content(folder, this_rank())
        elif manifest.optimizer is not None and this_rank() == 0:
            before, now = manifest.world_size, world_size()
            warn_caller(
                f"the step was saved by {before} ranks and is loaded by {now}: with the same loader and "
                f"grad_accum_steps a step of the optimizer has {now / before:.3g} times as many rows (with "
                "windows(global_batch=) as many as before). What was rank_state of each rank is in "
                "LoadedCheckpoint.rank_states"
            )
    with agreed(f"reading {folder} (the model is loaded in part)"):
        files = StoredFolder(folder)
        read_tensors(files, sources, tensors)
        for matched in optimizers:
            apply_optimizer(matched, files)
        has_loaded = optimizer is not None if manifest.optimizer else None
        record_of(model).keep(LoadedStep(manifest.step, has_loaded))
        if rng is not None:
            set_generator_states(rng)
    return LoadedCheckpoint(manifest.step, folder, train_state, rank_state, manifest.world_size)

"""A single file with the full state dict of a model, which other tools can read and write."""

import itertools
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.adapters import refuse_merged
from fsdp_sft._model.sharded import reshard
from fsdp_sft._model.state import (
    ModelTensors,
    match_tensors,
    model_tensors,
)
from fsdp_sft._ranks.agree import agreed, all_gather_objects, share, this_rank
from fsdp_sft._tensors.boxes import Box, box_of, local_of
from fsdp_sft._tensors.disk import closing, full_path, sync_folder, temporary_beside
from fsdp_sft._tensors.gather import Gatherer, receive_into, send
from fsdp_sft._tensors.reader import do_reads, threads_that_read
from fsdp_sft._tensors.safetensors import bytes_of, create, force_to_disk, write_at
from fsdp_sft._tensors.sharding import sharding_of
from fsdp_sft._tensors.stored import InFile, Read, file_header
from fsdp_sft._tensors.torch_file import read_pickled
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    abridged,
)
from fsdp_sft.shard.packing import packed_weights

_TORCH_SUFFIXES = (".pt", ".pth", ".bin")
_SUFFIXES = (*_TORCH_SUFFIXES, ".safetensors")

Described = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Files = dict[str, InFile]


def save_full_state_dict(
    model: nn.Module, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Write all parameters and persistent buffers to one file, from rank 0.

    The file appears complete or not at all: it is written under a temporary name, forced to the disk, and
    renamed to ``path``, where it replaces an earlier one.

    Args:
        model: The model, sharded or not.
        path: File to write; rank 0's argument counts. The suffix says the format: ``.safetensors`` (tied
            tensors are stored once, under their first name), or ``.pt``, ``.pth`` or ``.bin`` (all names are
            stored, as by ``torch.save(model.state_dict(), path)``).
        dtype: Dtype to which floating-point tensors are cast; None keeps the dtypes that they have.

    Raises:
        ValueError: If the suffix is another one, or the model is on the meta device.
        UnstorableStateError: If a module has state beside its parameters and buffers.
        OSError: If writing fails; raised on all ranks, and what was at ``path`` stays.

    Collective: all ranks.
    Memory: On rank 0 one full tensor for ``.safetensors``, and the full model for the other formats; on other
        ranks their own part of one tensor. All of it is CPU memory.

    Example:
        >>> fs.save_full_state_dict(model, "model.safetensors", dtype=torch.bfloat16)
        >>> from safetensors.torch import load_file
        >>> load_file("model.safetensors")["model.norm.weight"].dtype
        torch.bfloat16
    """
    target = full_path(path)
    reshard(model)
    temporary = temporary_beside(target)
    with agreed(f"preparing to save {target}"):
        refuse_merged(model, "saving the full state")
        _check_suffix(target)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
        content = model_tensors(model)
        dtypes = {
            n: dtype if dtype and t.is_floating_point() else t.dtype for n, t in content.tensors.items()
        }
        if this_rank() == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
    try:
        gatherer = Gatherer()
        write = _write_safetensors if target.suffix == ".safetensors" else _write_torch
        write(temporary, content, dtypes, gatherer)
        if this_rank() == 0:
            gatherer.attempt(lambda: _replace(temporary, target))
        gatherer.finish(f"writing {target}")
    finally:
        if this_rank() == 0:
            temporary.unlink(missing_ok=True)


def load_full_state_dict(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a full state dict from one file. Every rank takes its part, cast to the dtype that its shard has.

    Names, shapes and kinds of dtype are checked on all ranks before the model is touched. Floating-point
    tensors may have any floating-point dtype in the file. For tied tensors one of their names is enough.

    Args:
        model: The model, sharded or not; with memory, so not on the meta device.
        path: File that ``save_full_state_dict`` or ``torch.save(model.state_dict(), ...)`` wrote. Unless all
            ranks see it, with one size, rank 0 reads it and sends every rank its part.

    Raises:
        ValueError: If the suffix is another one, or the model is on the meta device.
        CheckpointNotFoundError: If rank 0 does not see the file.
        CheckpointCorruptError: If it is cut short, or holds anything but tensors. No code in it is run.
        CheckpointMismatchError: If it is of another model; the message lists the differences.

    Collective: all ranks; all raise the same error.
    Memory: A buffer of 1 MiB (for an accelerator two of 8 MiB) for each of at most 4 threads; the tensors of
        a tied pair.

    Example:
        >>> fs.save_full_state_dict(model, "model.pt")
        >>> fs.load_full_state_dict(model, "model.pt")
    """
    source_path = full_path(path)
    reshard(model)
    with agreed(f"preparing to load {source_path}"):
        refuse_merged(model, "loading the full state")
        if packed_weights(model) is not None:
            raise CheckpointMismatchError(
                f"{source_path} cannot be loaded into a model whose frozen weights are packed: build it with "
                "a dtype for frozen_dtype, or resume a step of save_checkpoint"
            )
        _check_suffix(source_path)
        content = model_tensors(model)
    sizes = all_gather_objects(source_path.stat().st_size if source_path.is_file() else None)
    if sizes[0] is None:
        raise CheckpointNotFoundError(f"there is no file {source_path} (as rank 0 sees it)")
    shared = len(set(sizes)) == 1
    files: Files = {}
    with agreed(f"opening {source_path}"):
        if shared or this_rank() == 0:
            files = _open(source_path.resolve())
    described: Described = share({name: (f.entry.dtype, f.entry.shape) for name, f in files.items()})
    with agreed(f"checking the model against {source_path}"):
        plan = _match(content, described)
        if files:
            _check_ties(content, plan, files, everywhere=not shared)
    names = {first: found[0] for first, found in plan.items()}
    if shared:
        with agreed(f"reading {source_path} (the model is loaded in part)"):
            reads: list[Read] = []
            for first, tensor in content.tensors.items():
                reads += _reads(files, names[first], box_of(tensor), local_of(tensor))
            do_reads(reads, workers=threads_that_read(), damaged=CheckpointCorruptError)
    else:
        _distribute(content, names, files, f"distributing {source_path}")


def _open(path: Path) -> Files:
    """Where each tensor of a file lies; the suffix says the format."""
    if path.suffix == ".safetensors":
        header = file_header(path, CheckpointCorruptError)
    else:
        header = read_pickled(path, CheckpointCorruptError)
    return {name: InFile(path, entry) for name, entry in header.entries.items()}


def _reads(files: Files, name: str, box: Box, out: torch.Tensor) -> Iterator[Read]:
    """Reads that fill ``out`` with the box ``box`` of a tensor."""
    return files[name].reads(name, files[name].piece(name), box, out)


def _read(files: Files, name: str, box: Box, out: torch.Tensor) -> None:
    do_reads(_reads(files, name, box, out), damaged=CheckpointCorruptError)


def _check_suffix(path: Path) -> None:
    """Refuse a suffix that names none of the formats."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(
            f"the suffix says the format: expected one of {', '.join(_SUFFIXES)}, got {path.name!r}"
        )


def _write_safetensors(
    path: Path, content: ModelTensors, dtypes: Mapping[str, torch.dtype], gatherer: Gatherer
) -> None:
    """Write a safetensors file, one gathered tensor after the other.

    Collective: all ranks.
    """
    described = {name: (dtypes[name], tuple(tensor.shape)) for name, tensor in content.tensors.items()}
    opened: list[Any] = []

    def start() -> None:
        if this_rank() == 0:
            opened.extend(create(path, described, {"format": "pt"})[:2])

    gatherer.attempt(start)
    for name, tensor in content.tensors.items():
        full = gatherer.gather(tensor, dtypes[name])
        if full is not None:
            gatherer.attempt(partial(_write_full, opened, name, full))
    if opened:
        with closing(opened[0]):
            gatherer.attempt(lambda: force_to_disk(opened[0]))


def _write_full(opened: list[Any], name: str, full: torch.Tensor) -> None:
    write_at(opened[0], opened[1].entries[name].start, bytes_of(full))


def _write_torch(
    path: Path, content: ModelTensors, dtypes: Mapping[str, torch.dtype], gatherer: Gatherer
) -> None:
    """Gather all tensors on rank 0 and write them by ``torch.save``.

    Collective: all ranks.
    """
    state: dict[str, torch.Tensor] = {}
    for name, tensor in content.tensors.items():
        full = gatherer.gather(tensor, dtypes[name])
        if full is not None and gatherer.error is None:
            # On an ordinary CPU model this may be a view of the model's own memory, a part of a larger
            # storage. torch.save writes whole storages, so such a view has to be copied.
            state[name] = full.clone() if full.untyped_storage().nbytes() != full.nbytes else full
    state.update({alias: state[first] for alias, first in content.ties.items() if first in state})

    def save() -> None:
        with open(path, "xb") as file:
            torch.save(state, file)
            file.flush()
            force_to_disk(file.fileno())

    if this_rank() == 0:
        gatherer.attempt(save)


def _replace(temporary: Path, target: Path) -> None:
    """Rename a finished file, whose contents are on the disk, and force its name to the disk too."""
    os.replace(temporary, target)
    sync_folder(target.parent)


def _match(content: ModelTensors, described: Described) -> dict[str, list[str]]:
    """The names that the file has of each of the model's tensors, by the tensor's first name.

    Raises:
        CheckpointMismatchError: If names, shapes or kinds of dtype differ.
    """
    found, problems = match_tensors(content, described, _is_castable)
    if problems:
        raise CheckpointMismatchError("the file is of another model: " + abridged(problems, "; "))
    return found


def _is_castable(stored: torch.dtype, live: torch.dtype) -> bool:
    return stored == live or (stored.is_floating_point and live.is_floating_point)


def _check_ties(
    content: ModelTensors, plan: Mapping[str, list[str]], files: Files, *, everywhere: bool
) -> None:
    """Refuse a file with different values under the names of a tied tensor, in this rank's part or in all."""
    for first, names in plan.items():
        tensor = content.tensors[first]
        every = sharding_of(tensor).parts(tensor.shape) if everywhere else [(this_rank(), box_of(tensor))]
        for _, box in every if len(names) > 1 else ():
            parts = [torch.empty(box.shape, dtype=files[name].entry.dtype) for name in names]
            pairs = zip(names, parts, strict=True)
            reads = [one for name, part in pairs for one in _reads(files, name, box, part)]
            do_reads(reads, damaged=CheckpointCorruptError)
            if any(bytes_of(part) != bytes_of(parts[0]) for part in parts[1:]):  # NaN is equal to itself here
                raise CheckpointMismatchError(f"{names} are one tensor in the model, but differ in the file")


def _distribute(content: ModelTensors, names: Mapping[str, str], files: Files, phase: str) -> None:
    """Let rank 0 read every rank's part of every tensor and send it.

    Collective: all ranks.
    """
    sender = Gatherer()  # only for `attempt` and `finish`: a rank that has failed keeps sending
    for first, tensor in content.tensors.items():
        sharding = sharding_of(tensor)
        copies = [sharding.parts(tensor.shape, copy) for copy in range(sharding.copies)]
        for rank, box in itertools.chain(*copies):
            if this_rank() not in (0, rank):
                continue
            part = torch.zeros(box.shape, dtype=tensor.dtype)
            if this_rank() == 0:
                sender.attempt(partial(_read, files, names[first], box, part))
                if rank != 0:
                    send(part, rank)
            else:
                receive_into(part, 0)
            if this_rank() == rank:
                with torch.no_grad():
                    local_of(tensor).copy_(part)
    sender.finish(phase)

"""A single file with the full state dict of a model, which other tools can read and write."""

import itertools
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn

from fsdp_sft._model.published import ModelTensors, match_tensors, model_tensors
from fsdp_sft._model.sharded import give_memory
from fsdp_sft._model.view import reshard
from fsdp_sft._ranks.agree import agreed, this_rank
from fsdp_sft._tensors.boxes import box_of, local_of
from fsdp_sft._tensors.disk import full_path, sync_folder, temporary_beside
from fsdp_sft._tensors.gather import Gatherer
from fsdp_sft._tensors.reader import do_reads, threads_that_read
from fsdp_sft._tensors.safetensors import bytes_of, create, force_to_disk, write_at
from fsdp_sft._tensors.stored import InFile, Read, file_header
from fsdp_sft.dcp_io.model_state import refuse_packed
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    abridged,
)

_CONVERT = "; a file of torch.save is written once more by save_file of safetensors.torch"


def save_full_state_dict(
    model: nn.Module, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Write all parameters and persistent buffers to one file, from rank 0.

    The file appears complete or not at all: it is written under a temporary name, forced to the disk, and
    renamed to ``path``, where it replaces an earlier one.

    Args:
        model: The model, sharded or not.
        path: File to write, whose name ends with ``.safetensors``; rank 0's argument counts. Tied tensors are
            stored once, under their first name.
        dtype: Dtype to which floating-point tensors are cast; None keeps the dtypes that they have.

    Raises:
        ValueError: If the suffix is another one, or the model is on the meta device.
        UnstorableStateError: If a module has state beside its parameters and buffers.
        OSError: If writing fails; raised on all ranks, and what was at ``path`` stays.

    Collective: all ranks.
    Memory: On rank 0 one full tensor, on other ranks their own part of one. All of it is CPU memory.

    Example:
        >>> fs.save_full_state_dict(model, "model.safetensors", dtype=torch.bfloat16)
        >>> from safetensors.torch import load_file
        >>> load_file("model.safetensors")["model.norm.weight"].dtype
        torch.bfloat16
    """
    target = full_path(path)
    reshard(model)
    temporary, gatherer = temporary_beside(target), Gatherer()
    with ExitStack() as opened:
        with agreed(f"preparing to save {target}"):
            if target.suffix != ".safetensors" or not (dtype is None or dtype.is_floating_point):
                raise ValueError(
                    "expected the suffix .safetensors, and a floating-point dtype or None; got "
                    f"{target.name!r} and {dtype!r}"
                )
            tensors = model_tensors(model, "saving the full state").tensors
            dtypes = {n: dtype if dtype and t.is_floating_point() else t.dtype for n, t in tensors.items()}
            if this_rank() == 0:
                target.parent.mkdir(parents=True, exist_ok=True)
                described = {name: (dtypes[name], tuple(tensor.shape)) for name, tensor in tensors.items()}
                opened.callback(temporary.unlink, missing_ok=True)
                fd, header, _ = create(temporary, described, {"format": "pt"})
                opened.callback(os.close, fd)
        for name, tensor in tensors.items():
            full = gatherer.gather(tensor, dtypes[name])
            if full is not None:
                gatherer.attempt(partial(write_at, fd, header.entries[name].start, bytes_of(full)))
        gatherer.finish(f"writing {target}")  # a rank that has failed sent zeros, which must not be published
        with agreed(f"publishing {target}"):
            if this_rank() == 0:
                force_to_disk(fd)
                os.replace(temporary, target)
                sync_folder(target.parent)


def load_full_state_dict(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a full state dict from one file. Every rank takes its part, cast to the dtype that its shard has.

    Names, shapes and kinds of dtype are checked on all ranks before the model is touched. Floating-point
    tensors may have any floating-point dtype in the file. For tied tensors one of their names is enough.

    Args:
        model: The model, sharded or not; with memory, so not on the meta device.
        path: A safetensors file that all ranks see, as ``save_full_state_dict`` writes it.

    Raises:
        ValueError: If the model is on the meta device, with buffers that belong in no file.
        CheckpointNotFoundError: If a rank does not see the file.
        CheckpointCorruptError: If it is cut short, or no safetensors file.
        CheckpointMismatchError: If it is of another model; the message lists the differences.

    Collective: all ranks; all raise the same error.
    Memory: A buffer of a quarter of a MiB (for an accelerator 8 MiB) for each of at most 4 threads; the
        tensors of a tied pair.

    Example:
        >>> fs.save_full_state_dict(model, "model.safetensors")
        >>> fs.load_full_state_dict(model, "model.safetensors")
    """
    source_path = full_path(path)
    reshard(model)
    with agreed(f"preparing to load {source_path}"):
        refuse_packed(model, source_path)
        give_memory(model)
        content = model_tensors(model, "loading the full state")
        if not source_path.is_file():
            raise CheckpointNotFoundError(f"there is no file {source_path} (as rank {this_rank()} sees it)")
        file = source_path.resolve()
        entries = file_header(file, CheckpointCorruptError, _CONVERT).entries
        files = {name: InFile(file, entry) for name, entry in entries.items()}
        found, problems = match_tensors(
            content, {name: (entry.dtype, entry.shape) for name, entry in entries.items()}, casts=True
        )
        if problems:
            raise CheckpointMismatchError("the file is of another model: " + abridged(problems, "; "))
        _check_ties(content, found, files)
    with agreed(f"reading {source_path} (the model is loaded in part)"):
        reads: list[Read] = []
        for first, tensor in content.tensors.items():
            name = found[first][0]
            reads += files[name].reads(files[name].piece(name), box_of(tensor), local_of(tensor))
        do_reads(reads, workers=threads_that_read(), damaged=CheckpointCorruptError)


def _check_ties(content: ModelTensors, found: Mapping[str, list[str]], files: Mapping[str, InFile]) -> None:
    """Refuse a file with different values, in this rank's part, under the names of a tied tensor."""
    for first, names in ((first, names) for first, names in found.items() if len(names) > 1):
        box = box_of(content.tensors[first])
        parts = {name: torch.empty(box.shape, dtype=files[name].entry.dtype) for name in names}
        reads = (files[name].reads(files[name].piece(name), box, part) for name, part in parts.items())
        do_reads(itertools.chain.from_iterable(reads), damaged=CheckpointCorruptError)
        if len({bytes_of(part).tobytes() for part in parts.values()}) > 1:  # NaN is equal to itself here
            raise CheckpointMismatchError(f"{names} are one tensor in the model, but differ in the file")

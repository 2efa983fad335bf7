"""A single file with the full state dict of a model, which other tools can read and write."""

import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from fsdp_sft._model.adapters import refuse_merged
from fsdp_sft._model.sharded import reshard
from fsdp_sft._model.state import ModelTensors, match_tensors, model_tensors
from fsdp_sft._process.bounds import MAX_HEADER_BYTES
from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._ranks.agree import agreed, this_rank
from fsdp_sft._tensors.boxes import Box, box_of, local_of
from fsdp_sft._tensors.disk import full_path, sync_folder, temporary_beside
from fsdp_sft._tensors.gather import Gatherer
from fsdp_sft._tensors.reader import do_reads, threads_that_read
from fsdp_sft._tensors.safetensors import bytes_of, create, force_to_disk, open_file, write_at
from fsdp_sft._tensors.stored import InFile, Read, file_header
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    abridged,
)
from fsdp_sft.shard.packing import packed_weights


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
            refuse_merged(model, "saving the full state")
            if target.suffix != ".safetensors" or not (dtype is None or dtype.is_floating_point):
                raise ValueError(
                    "expected the suffix .safetensors, and a floating-point dtype or None; got "
                    f"{target.name!r} and {dtype!r}"
                )
            tensors = model_tensors(model).tensors
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
        path: File that all ranks see: ``.safetensors``, as ``save_full_state_dict`` writes it, or what
            ``torch.save(model.state_dict(), ...)`` wrote, with any other suffix.

    Raises:
        ValueError: If the model is on the meta device.
        CheckpointNotFoundError: If a rank does not see the file.
        CheckpointCorruptError: If it is cut short, or holds anything but tensors. No code in it is run.
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
        refuse_merged(model, "loading the full state")
        if packed_weights(model) is not None:
            raise CheckpointMismatchError(
                f"{source_path} cannot be loaded into a model whose frozen weights are packed: build it with "
                "a dtype for frozen_dtype, or resume a step of save_checkpoint"
            )
        content = model_tensors(model)
        files = _open(source_path)
        entries = {name: getattr(file, "entry", file) for name, file in files.items()}
        described = {name: (entry.dtype, tuple(entry.shape)) for name, entry in entries.items()}
        found, problems = match_tensors(content, described, casts=True)
        if problems:
            raise CheckpointMismatchError("the file is of another model: " + abridged(problems, "; "))
        _check_ties(content, found, described, files)
    with agreed(f"reading {source_path} (the model is loaded in part)"):
        reads: list[Read] = []
        for first, tensor in content.tensors.items():
            reads += _reads(files, found[first][0], box_of(tensor), local_of(tensor))
        do_reads(reads, workers=threads_that_read(), damaged=CheckpointCorruptError)


def _open(path: Path) -> Mapping[str, Any]:
    """Where each tensor of a file lies (``InFile``); of another one than safetensors the tensor, mapped."""
    if not path.is_file():
        raise CheckpointNotFoundError(f"there is no file {path} (as rank {this_rank()} sees it)")
    path = path.resolve()
    if path.suffix != ".safetensors":
        return load_pickled(path, CheckpointCorruptError)
    return {name: InFile(path, e) for name, e in file_header(path, CheckpointCorruptError).entries.items()}


def _reads(files: Mapping[str, Any], name: str, box: Box, out: torch.Tensor) -> Iterator[Read]:
    """Reads that fill ``out`` with the box ``box`` of a tensor; of one that is mapped it is filled here."""
    if isinstance(files[name], torch.Tensor):
        out.copy_(files[name][box.slices])
    else:
        yield from files[name].reads(files[name].piece(name), box, out)


def _check_ties(
    content: ModelTensors,
    found: Mapping[str, list[str]],
    described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    files: Mapping[str, Any],
) -> None:
    """Refuse a file with different values, in this rank's part, under the names of a tied tensor."""
    for first, names in found.items():
        box = box_of(content.tensors[first])
        if len(names) < 2:
            continue
        parts = {name: torch.empty(box.shape, dtype=described[name][0]) for name in names}
        reads = [read for name, part in parts.items() for read in _reads(files, name, box, part)]
        do_reads(reads, damaged=CheckpointCorruptError)
        if len({bytes_of(part).tobytes() for part in parts.values()}) > 1:  # NaN is equal to itself here
            raise CheckpointMismatchError(f"{names} are one tensor in the model, but differ in the file")


# Files that ``torch.save`` wrote: their tensors, mapped into memory, and no code run.
#
# torch's own reader of plain data (``weights_only``) reads them. What would cost more than the file has bytes
# is refused before.

_SIGNATURE = b"PK\x03\x04"
_CONVERT = "convert it once: torch.save(torch.load(path, weights_only=True), path)"
_DAMAGED = (  # what a damaged archive or pickle makes zipfile and torch raise
    *(OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, AssertionError),
    *(ArithmeticError, EOFError, struct.error, zipfile.BadZipFile),
)


def load_pickled(path: Path, damaged: type[Exception] = CheckpointFormatError) -> dict[str, torch.Tensor]:
    """The tensors of a file that ``torch.save`` wrote, by name, mapped into memory: read where they are used.

    Args:
        path: File with a dictionary of names to tensors; the last component must not be a symbolic link.
        damaged: Class of the error for a file that cannot be used.

    Raises:
        CheckpointFormatError: If the file is damaged, is not such a dictionary, wants to run code, or is
            older than torch 1.6 (then it is ``damaged``).
        OSError: If this process may open no more files, or may not open this one.

    Memory: In proportion to the pickle, which has at most 100 MB.
    """
    try:
        with os.fdopen(open_file(path), "rb") as file:
            _refuse_costly(_pickle_of(file))
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(f"it holds {type(state).__name__}, not a dictionary of tensors")
        for name, tensor in state.items():
            if not isinstance(name, str):
                raise ValueError(f"a key of it is {type(name).__name__}, and not the name of a tensor")
            # A DTensor is the shard of one rank: torch.save of a sharded model's state dict on each of them.
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
                raise ValueError(
                    f"{name!r} is {type(tensor).__name__}, not a tensor of plain numbers: save a full state "
                    "dict"
                )
        return {name: tensor.detach() for name, tensor in state.items()}
    except pickle.UnpicklingError as error:
        why = str(error.__context__ or error).splitlines()[0]
        raise damaged(
            f"{path} cannot be used: its pickle holds more than tensors, and was not run; save a state dict "
            f"({why:.200})"
        ) from None
    except _DAMAGED as error:
        blame_no_file(error, path)
        why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error!s:.200}"
        raise damaged(f"{path} cannot be used: {why}") from None


def _pickle_of(file: IO[bytes]) -> bytes:
    """The pickle of an archive.

    Raises:
        ValueError: If it is none that ``torch.save`` writes.
    """
    if file.read(4) != _SIGNATURE:
        raise ValueError(f"it is not a zip archive, so it is damaged or from before torch 1.6; {_CONVERT}")
    with zipfile.ZipFile(file) as archive:
        infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ValueError(f"{info.filename} is compressed, which torch.save never does; {_CONVERT}")
        if "data.pkl" not in infos or len(infos) != len(archive.infolist()):
            raise ValueError(f"it has no pickle, or two, so torch.save has not written it; {_CONVERT}")
        if (size := infos["data.pkl"].file_size) > MAX_HEADER_BYTES:
            raise ValueError(f"its pickle has {size} bytes, more than {MAX_HEADER_BYTES}")
        return archive.read(infos["data.pkl"])


def _refuse_costly(pickled: bytes) -> None:
    """Refuse what a state dict has no need of, and what would cost more than the file has bytes.

    A tuple that is named again (60 pairs of pairs are 2^60 parts), and names out of other places than torch
    (``bytearray`` makes as many bytes as it is asked for).

    Raises:
        ValueError: If there is such a thing, or it is no pickle.
    """
    tuples: set[Any] = set()
    is_tuple = False
    for code, argument, _ in pickletools.genops(pickled):
        if "PUT" in code.name and is_tuple:
            tuples.add(argument)
        elif "GET" in code.name and argument in tuples:
            raise ValueError("its pickle names a tuple again, which no state dict does")
        elif "GLOBAL" in code.name and not str(argument).startswith(("torch", "collections OrderedDict")):
            raise pickle.UnpicklingError(f"it names {argument}")
        is_tuple = code.name.startswith("TUPLE")

"""Files that ``torch.save`` wrote: their tensors, mapped into memory, and no code run.

torch's own reader of plain data (``weights_only``) reads them. What would cost more than the file has bytes
is refused before.
"""

import os
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from fsdp_sft._process.bounds import MAX_HEADER_BYTES
from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.safetensors import open_file
from fsdp_sft.errors import CheckpointFormatError

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

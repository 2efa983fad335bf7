"""The safetensors format at the level of bytes: headers, positional reads and writes.

A file is an 8-byte little-endian length, a header of that many bytes of JSON, and then the tensors' bytes
without gaps. Headers come from disk and are not trusted: safetensors itself reads and checks them.

Source: https://github.com/huggingface/safetensors#format
"""

import errno
import json
import math
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fsdp_sft._process.bounds import MAX_HEADER_BYTES, check_sizes
from fsdp_sft.errors import CheckpointFormatError

_MAX_IO_BYTES = 1 << 30  # Linux reads or writes at most 2 GiB per call
_ALIGNMENT = 8  # of the tensors' first byte

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Where and how a file stores one tensor.

    Attributes:
        dtype: Dtype of the stored elements.
        shape: Shape of the tensor.
        start: Position of its first byte in the file.
        end: Position one past its last byte.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the tensor takes."""
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Attributes:
        entries: Tensors by name, in the order of their bytes.
        metadata: Free text by name.
        file_bytes: Size of the whole file, in bytes.
    """

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    file_bytes: int


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a dtype, such as ``"BF16"``.

    Raises:
        CheckpointFormatError: If the format does not have that dtype.
    """
    if dtype not in DTYPE_NAMES:
        raise CheckpointFormatError(f"safetensors cannot store {dtype}; it knows {', '.join(DTYPES)}")
    return DTYPE_NAMES[dtype]


def num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Number of bytes of a contiguous tensor."""
    return dtype.itemsize * math.prod(shape)


def create(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[int, Header, bytes]:
    """Make a file of its final size and write its header. Tensors can then be written in any order.

    Those of the widest dtypes come first, then by name, which keeps all of them aligned.

    Args:
        path: The file.
        tensors: Dtype and shape of each tensor, by name.
        metadata: Free text by name.

    Returns:
        (open file descriptor, layout, bytes of the header as written).

    Raises:
        CheckpointFormatError: If a dtype cannot be stored, or the header would be too large.
        FileExistsError: If something of that name exists.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name in order:
        dtype, shape = tensors[name]
        start, end = end, end + num_bytes(dtype, shape)
        offsets[name] = (start, end)
        described[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointFormatError(f"the header would take {len(text)} bytes, more than {MAX_HEADER_BYTES}")
    first = len(text) + 8
    entries = {
        name: TensorEntry(tensors[name][0], tuple(tensors[name][1]), start + first, stop + first)
        for name, (start, stop) in offsets.items()
    }
    head, header = struct.pack("<Q", len(text)) + text, Header(entries, dict(metadata or {}), first + end)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        os.ftruncate(fd, header.file_bytes)
        write_at(fd, 0, memoryview(head))
    except BaseException:
        os.close(fd)
        raise
    return fd, header, head


def open_file(path: Path) -> int:
    """Open a regular file for reading; the last component of the path must not be a symbolic link."""
    # O_NONBLOCK: opening a named pipe would otherwise wait for somebody to write to it.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointFormatError(f"{path} is not a regular file")
    return fd


def read_header(fd: int) -> Header:
    """Read a file's header by safetensors' own reader, which checks it against the size of the file.

    Raises:
        CheckpointFormatError: If the file is cut short, if the header is too large or not as the format
            requires, or if tensors overlap, leave a gap or lie outside the file.
    """
    prefix = bytearray(8)
    read_at(fd, 0, memoryview(prefix))
    (length,) = struct.unpack("<Q", prefix)
    entries: dict[str, TensorEntry] = {}
    end = length + 8
    try:
        with safe_open(f"/dev/fd/{fd}", "np") as file:
            for name in file.offset_keys():
                tensor = file.get_slice(name)
                dtype, shape = tensor.get_dtype(), check_sizes(tensor.get_shape(), f"the shape of {name!r}")
                if dtype not in DTYPES:
                    raise ValueError(f"{name!r} is stored as {dtype}, none of {', '.join(DTYPES)}")
                start, end = end, end + num_bytes(DTYPES[dtype], shape)
                entries[name] = TensorEntry(DTYPES[dtype], shape, start, end)
            return Header(entries, file.metadata() or {}, end)
    except (SafetensorError, ValueError) as error:
        raise CheckpointFormatError(f"it is no safetensors file: {error}") from None


def advise(fd: int, offset: int, num_bytes: int, advice: str) -> None:
    """Give the system advice about a file. Errors are ignored: a file system need not support advice.

    ``"POSIX_FADV_RANDOM"``: only parts of the file will be read. Without this Linux also fetches what follows
    each part, up to several MiB. When four machines shared the rows of a checkpoint, each fetched 0.7 of it
    instead of its quarter. ``"POSIX_FADV_WILLNEED"``: the range will be read soon.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, offset, num_bytes, getattr(os, advice))


def read_at(fd: int, offset: int, buffer: memoryview) -> None:
    """Fill ``buffer`` from the file, from byte ``offset`` on; the file's own position does not move.

    Raises:
        CheckpointFormatError: If the file ends before the buffer is full.
    """
    view = buffer.cast("B")
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done : done + _MAX_IO_BYTES]], offset + done)
        if count == 0:
            raise CheckpointFormatError(
                f"the file ends at byte {offset + done}, {len(view) - done} too early"
            )
        done += count


def write_at(fd: int, offset: int, buffer: memoryview) -> None:
    """Write all of ``buffer`` to the file, from byte ``offset`` on.

    Raises:
        OSError: If writing fails; the message names the file, which the system's does not.
    """
    view = buffer.cast("B")
    done = 0
    try:
        while done < len(view):
            done += os.pwrite(fd, view[done : done + _MAX_IO_BYTES], offset + done)
    except OSError as error:
        raise _with_path(error, fd, f"writing {len(view) - done:,} bytes to") from error


def force_to_disk(fd: int) -> None:
    """``os.fsync`` whose errors name the file; some file systems report only here that they are full."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise _with_path(error, fd, "forcing to the disk") from error


def _with_path(error: OSError, fd: int, doing: str) -> OSError:
    """The same error with what failed, on which file, and how much is free on a full file system."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # not on Linux
        path = "a file"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    usage = os.fstatvfs(fd) if full else None
    free = "" if usage is None else f"; its file system has {usage.f_bavail * usage.f_frsize:,} bytes free"
    return OSError(error.errno, f"{error.strerror or error}: {doing} {path}{free}")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which stays valid only as long as the tensor exists."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

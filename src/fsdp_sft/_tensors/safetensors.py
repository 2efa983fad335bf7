"""The safetensors format at the level of bytes: headers, positional reads and writes.

A file is an 8-byte little-endian length, a header of that many bytes of JSON, and then the tensors' bytes
without gaps. Headers come from disk and are not trusted: sizes are bounded, and offsets must be contiguous
and inside the file.

Source: https://github.com/huggingface/safetensors#format
"""

import errno
import json
import os
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_sft._process.bounds import MAX_HEADER_BYTES, check_sizes, parse_json
from fsdp_sft.errors import CheckpointFormatError

_MAX_IO_BYTES = 1 << 30  # Linux reads or writes at most 2 GiB per call
_ALIGNMENT = 8  # of the tensors' first byte
_METADATA = "__metadata__"
_OF_AN_ENTRY = {"dtype", "shape", "data_offsets"}

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
        stride: Distance between neighbours in the file, in elements, per dimension; None is row-major order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    stride: tuple[int, ...] | None = None

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
    total = dtype.itemsize
    for size in shape:
        total *= size
    return total


def encode_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Header]:
    """Lay out a file: tensors of the widest dtypes first, then by name, which keeps all of them aligned.

    Args:
        tensors: Dtype and shape of each tensor, by name.
        metadata: Free text by name.

    Returns:
        (bytes of the header and of its length, with which the file begins; the layout).

    Raises:
        CheckpointFormatError: If a dtype or a name cannot be stored, or the header would be too large.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    described: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name in order:
        if name == _METADATA:
            raise CheckpointFormatError(f"a tensor cannot be named {_METADATA!r}")
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
    return struct.pack("<Q", len(text)) + text, Header(entries, dict(metadata or {}), first + end)


def create(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[int, Header, bytes]:
    """Make a file of its final size and write its header. Tensors can then be written in any order.

    Returns:
        (open file descriptor, layout, bytes of the header as written).

    Raises:
        FileExistsError: If something of that name exists.
    """
    head, header = encode_header(tensors, metadata)
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
    """Read and check a file's header.

    Raises:
        CheckpointFormatError: If the file is cut short, if the header is too large or not as the format
            requires, or if tensors overlap, leave a gap or lie outside the file.
    """
    file_bytes = os.fstat(fd).st_size
    if file_bytes < 8:
        raise CheckpointFormatError(f"a safetensors file has at least 8 bytes, this one {file_bytes}")
    prefix = bytearray(8)
    read_at(fd, 0, memoryview(prefix))
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES or length + 8 > file_bytes:
        raise CheckpointFormatError(f"the header claims {length} bytes; the file has {file_bytes}")
    text = bytearray(length)
    read_at(fd, 8, memoryview(text))
    return parse_header(bytes(text), file_bytes)


def parse_header(text: bytes, file_bytes: int) -> Header:
    """Check the JSON of a header against the size of its file; see ``read_header``."""
    signs = {"parse_int": _size} if b"-" in text else {}
    try:
        described = parse_json(
            text, "the header", finite=True, object_pairs_hook=_without_duplicates, **signs
        )
    except ValueError as error:
        raise CheckpointFormatError(str(error)) from None
    if not isinstance(described, dict):
        raise CheckpointFormatError("the header is not a JSON object")
    metadata = described.pop(_METADATA, None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointFormatError("the header's metadata is not an object of strings")
    first = len(text) + 8
    entries = {name: _parse_entry(name, value, first) for name, value in described.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    _check_contiguous(entries, first, file_bytes)
    return Header(entries, metadata, file_bytes)


def expect_parts(fd: int) -> None:
    """Tell the system that only parts of a file will be read, so that it does not read ahead.

    Without this Linux also fetches what follows each part, up to several MiB. When four machines shared the
    rows of a checkpoint, each fetched 0.7 of it instead of its quarter.
    """
    _advise(fd, 0, 0, "POSIX_FADV_RANDOM")


def expect(fd: int, offset: int, num_bytes: int) -> None:
    """Ask the system to fetch a range of the file that will be read soon."""
    _advise(fd, offset, num_bytes, "POSIX_FADV_WILLNEED")


def _advise(fd: int, offset: int, num_bytes: int, advice: str) -> None:
    """Give the system advice about a file. Errors are ignored: a file system need not support advice."""
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
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; refuses names that occur twice, of which ``json`` would keep the last."""
    seen: dict[str, Any] = {}
    for name, value in pairs:
        if name in seen:
            raise CheckpointFormatError(f"the header names {name!r} twice")
        seen[name] = value
    return seen


def _size(digits: str) -> int:
    """A number of a header; -0 is a floating-point number for others, and no size."""
    return int(digits) if digits != "-0" else -1


def _parse_entry(name: str, value: Any, first: int) -> TensorEntry:
    """One tensor of a header, checked; ``first`` is the file's first byte after the header."""
    try:
        dtype = value["dtype"]
        shape = check_sizes(value["shape"], "its shape")
        start, end = check_sizes(value["data_offsets"], "its place")
        if dtype not in DTYPES:
            raise ValueError(f"stored as {dtype}, none of {', '.join(DTYPES)}")
        if _checked_bytes(DTYPES[dtype], shape) != end - start:
            raise ValueError("its shape and its place differ in size")
        if any(isinstance(value[key], (dict, list)) for key in value.keys() - _OF_AN_ENTRY):
            raise ValueError("it has parts that no tensor has")
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointFormatError(
            f"the header's entry of {name!r} is not valid: {str(value)[:200]} ({error})"
        ) from None
    return TensorEntry(DTYPES[dtype], shape, start + first, end + first)


def _checked_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a tensor whose sizes can be multiplied in the order in which they are written.

    Raises:
        ValueError: If a product on the way is more than 64 bits hold, also where a later size is 0.
    """
    total = 1
    for size in shape:
        total *= size
        if total * 8 * dtype.itemsize >= 1 << 64:
            raise ValueError("it has more bytes than a file can hold")
    return total * dtype.itemsize


def _check_contiguous(entries: Mapping[str, TensorEntry], first: int, file_bytes: int) -> None:
    """Check that tensors, in the order of their bytes, fill the file without overlaps or gaps."""
    end = first
    for name, entry in entries.items():
        if entry.start != end:
            raise CheckpointFormatError(
                f"{name!r} begins at byte {entry.start}, the tensors before end at {end}"
            )
        end = entry.end
    if end != file_bytes:
        raise CheckpointFormatError(f"the tensors end at byte {end}, the file at {file_bytes}")

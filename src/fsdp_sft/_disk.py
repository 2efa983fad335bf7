"""Files and folders that are there whole or not at all.

Files are hashed on the way out and put on the disk (fsync), and read by position. A folder is filled under a
temporary name beside its own and appears by one rename; what a job that was killed has left is swept away by
the next.
"""

import contextlib
import errno
import glob
import hashlib
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from fsdp_sft._boxes import Box, part_of, whole
from fsdp_sft._limits import blame_no_file, open_files_limit
from fsdp_sft._safetensors import (
    Header,
    TensorEntry,
    bytes_of,
    create,
    open_file,
    read_at,
    read_header,
    write_at,
)
from fsdp_sft.errors import CheckpointCorruptError, SafetensorsError

_BUFFER_BYTES = 16 << 20
_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows of a file.

    Attributes:
        size: In bytes.
        sha256: Of all its bytes, in hexadecimal.
    """

    size: int
    sha256: str


@dataclass(frozen=True)
class Deferred:
    """A tensor that is read from somewhere when its turn to be written has come.

    Attributes:
        shape: Of it.
        dtype: Of its elements.
        read: Gives it, in CPU memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor | Deferred], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a safetensors file and put it on the disk (fsync); it is hashed meanwhile in a thread.

    Memory: One of the tensors in CPU memory, if it is not there already.
    """
    described = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    fd, header, head = create(path, described, metadata)
    with _Hasher(head) as hasher, closing(fd):
        for name, entry in header.entries.items():
            tensor = tensors[name]
            if isinstance(tensor, Deferred):
                tensor = tensor.read()
            staged = tensor.detach().to("cpu").contiguous()
            view = bytes_of(staged)
            hasher.begin(view)
            write_early(fd, entry.start, view)
            hasher.wait()
        os.fsync(fd)
        return FileRecord(header.file_bytes, hasher.hexdigest())


def write_early(fd: int, offset: int, view: memoryview) -> None:
    """Write, and let the disk begin at once: the fsync at the end then has little left to wait for."""
    for first in range(0, len(view), _BUFFER_BYTES):
        piece = view[first : first + _BUFFER_BYTES]
        write_at(fd, offset + first, piece)
        if hasattr(os, "posix_fadvise"):
            # On Linux this starts to write dirty pages, and drops clean ones, of which there are none yet.
            os.posix_fadvise(fd, offset + first, len(piece), os.POSIX_FADV_DONTNEED)


class _Hasher:
    """SHA-256 in a thread of its own; hashlib lets go of the GIL.

    No executor: those take no work once the interpreter waits for its threads, as it does for an asynchronous
    save at the end of a program.
    """

    def __init__(self, head: bytes) -> None:
        self._digest = hashlib.sha256(head)
        self._work: SimpleQueue[memoryview | None] = SimpleQueue()
        self._done = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="fsdp_sft-hash")

    def __enter__(self) -> "_Hasher":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._work.put(None)
        self._thread.join()

    def begin(self, view: memoryview) -> None:
        """Hash ``view``, which must stay as it is until ``wait`` returns."""
        self._work.put(view)

    def wait(self) -> None:
        """Return when what was begun is hashed."""
        self._done.acquire()

    def hexdigest(self) -> str:
        """Of everything so far."""
        return self._digest.hexdigest()

    def _run(self) -> None:
        while (view := self._work.get()) is not None:
            self._digest.update(view)
            self._done.release()


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a small file and put it on the disk (fsync)."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with closing(fd):
        write_at(fd, 0, memoryview(data))
        os.fsync(fd)
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def sync_file(path: Path) -> None:
    """Put a file that has been written on the disk."""
    fd = os.open(path, os.O_RDONLY)
    with closing(fd):
        os.fsync(fd)


def sync_folder(path: Path) -> None:
    """Put a folder's entries on the disk, where the file system knows that for folders."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    with closing(fd):
        try:
            os.fsync(fd)
        except OSError as error:
            # What mounts of object stores and some network file systems answer for folders, never for files.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise


def renames_whole(folder: Path) -> bool:
    """Whether a folder below ``folder`` keeps its files when it is renamed.

    Where a rename is a copy and a deletion, as on mounts of object stores, the files are others afterwards,
    and whoever looks meanwhile sees a part of them.
    """
    before, after = (temporary_beside(folder / "rename") for _ in range(2))
    before.mkdir()
    try:
        (before / "file").touch()
        number = (before / "file").stat().st_ino
        os.rename(before, after)
        return (after / "file").stat().st_ino == number
    finally:
        for left in (before, after):
            shutil.rmtree(left, ignore_errors=True)


def read_bytes(path: Path, most: int) -> bytes:
    """A regular file's bytes.

    Raises:
        CheckpointCorruptError: If it is missing, a symbolic link, or longer than ``most`` bytes.
        OSError: If no file could be opened now, or this one must not be.
    """
    try:
        fd = open_file(path)
        with closing(fd):
            size = os.fstat(fd).st_size
            if size > most:
                raise SafetensorsError(f"it has {size} bytes, more than {most}")
            data = bytearray(size)
            read_at(fd, 0, memoryview(data))
    except (OSError, SafetensorsError) as error:
        blame_no_file(error, path)
        raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error
    return bytes(data)


def file_problem(folder: Path, name: str, record: FileRecord, *, hashes: bool) -> str | None:
    """How a file below ``folder`` differs from its record, or None. The folder alone may be a link.

    Raises:
        OSError: If no file could be opened now, or this one must not be.
    """
    path = folder / name
    try:
        status = path.lstat()
        in_place = path.parent == folder or stat.S_ISDIR(path.parent.lstat().st_mode)
        if not stat.S_ISREG(status.st_mode) or not in_place:
            return "is not a regular file"
        if status.st_size != record.size:
            return f"has {status.st_size} bytes instead of {record.size}"
        if hashes:
            fd = open_file(path)
            with closing(fd), os.fdopen(fd, "rb", closefd=False) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                    return "has other contents than were written (SHA-256 differs)"
    except FileNotFoundError:
        return "is missing"
    except (OSError, SafetensorsError) as error:
        blame_no_file(error, path)
        return f"cannot be read: {error}"
    return None


class TensorReader:
    """Reads parts of tensors from the safetensors files below a folder.

    What lies in memory as it lies in the file is read in place, the rest through one reused buffer. Of the
    files that this process may open it takes a quarter at most: a step of 1,024 ranks has 2,048.

    Attributes:
        bytes_read: Of tensors, so far.

    Memory: 16 MiB.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._headers: dict[str, Header] = {}
        self._descriptors: dict[str, int] = {}  # in the order of their last use
        self._most_open = max(4, open_files_limit() // 4)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.bytes_read = 0

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for fd in self._descriptors.values():
            os.close(fd)
        self._descriptors.clear()

    def header(self, file: str) -> Header:
        """The checked header of a file.

        Raises:
            CheckpointCorruptError: If it is not sound.
            OSError: If no file could be opened now, or this one must not be.
        """
        if file not in self._headers:
            try:
                self._headers[file] = read_header(self._descriptor(file))
            except (OSError, SafetensorsError) as error:
                blame_no_file(error, self._folder / file)
                raise CheckpointCorruptError(f"{self._folder / file} cannot be read: {error}") from error
        return self._headers[file]

    def read(self, file: str, name: str, out: torch.Tensor, part: Box | None = None) -> None:
        """Read ``part`` (None: all) of a stored tensor into ``out``, which may be on any device.

        ``out`` has the part's shape; a different dtype is cast to.

        Raises:
            CheckpointCorruptError: If the bytes cannot be read.
            OSError: If no file could be opened now, or this one must not be.
        """
        entry = self.header(file).entries[name]
        try:
            with torch.no_grad():
                self._read(self._descriptor(file), entry, part or whole(entry.shape), out)
        except (OSError, SafetensorsError) as error:
            blame_no_file(error, self._folder / file)
            raise CheckpointCorruptError(f"{self._folder / file} cannot be read: {error}") from error

    def _descriptor(self, file: str) -> int:
        fd = self._descriptors.pop(file, None)
        if fd is None:
            while len(self._descriptors) >= self._most_open:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            fd = open_file(self._folder / file)
        self._descriptors[file] = fd
        return fd

    def _read(self, fd: int, entry: TensorEntry, part: Box, out: torch.Tensor) -> None:
        if part.shape[1:] == entry.shape[1:]:  # one stretch of the file
            row_bytes = _row_bytes(entry)
            start = entry.start + (part.offset[0] * row_bytes if part.offset else 0)
            self._read_stretch(fd, entry.dtype, start, out)
            return
        rows, row_shape = part.shape[0], entry.shape[1:]
        row_bytes = _row_bytes(entry)
        for row in range(rows):
            start = entry.start + (part.offset[0] + row) * row_bytes
            inner = TensorEntry(entry.dtype, row_shape, start, start + row_bytes)
            self._read(fd, inner, Box(part.offset[1:], part.shape[1:]), out[row])

    def _read_stretch(self, fd: int, dtype: torch.dtype, start: int, out: torch.Tensor) -> None:
        self.bytes_read += out.numel() * dtype.itemsize
        if out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous():
            read_at(fd, start, bytes_of(out))
            return
        if not self._buffer.numel():
            self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
        target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        flat = target.view(-1)
        step = _BUFFER_BYTES // dtype.itemsize
        for first in range(0, flat.numel(), step):
            piece = flat[first : first + step]
            num_bytes = piece.numel() * dtype.itemsize
            read_at(fd, start + first * dtype.itemsize, bytes_of(self._buffer[:num_bytes]))
            piece.copy_(self._buffer[:num_bytes].view(dtype))
        if target is not out:
            out.copy_(target)


def read_into(
    reader: TensorReader, name: str, chunks: Iterable[tuple[str, Box]], box: Box, out: torch.Tensor
) -> None:
    """Fill ``out``, which is ``box`` of a tensor, from the files that have the tensor's parts."""
    for file, chunk in chunks:
        common = chunk.intersect(box)
        if common is not None and common.numel:
            reader.read(file, name, part_of(out, common.relative_to(box)), common.relative_to(chunk))


def temporary_beside(target: Path) -> Path:
    """A new name in the same folder, for what is to be renamed to ``target``."""
    return target.with_name(f"{_prefix(target)}{uuid.uuid4().hex}")


def unsound_beside(target: Path) -> Path:
    """A new name for something at ``target`` that is to make room and to be looked at later."""
    return target.with_name(f".unsound-{target.name}-{uuid.uuid4().hex}")


def sweep(target: Path) -> None:
    """Delete the folders that jobs which were killed have left on their way to ``target``."""
    for stale in target.parent.glob(
        f"{glob.escape(_prefix(target))}{'[0-9a-f]' * 32}"
    ):  # not of "<target>-2"
        shutil.rmtree(stale, ignore_errors=True)


def sweep_all(root: Path) -> None:
    """The same for every target below ``root``; what others have named alike stays."""
    for stale in root.glob(f"{_TEMPORARY}*-{'[0-9a-f]' * 32}"):
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale, ignore_errors=True)


def publish(temporary: Path, target: Path, *, aside: Path | None = None) -> None:
    """Let a finished folder appear under its name, whole or not at all.

    Args:
        temporary: The folder; its files are on the disk already.
        target: Its name, at which there may be an empty folder.
        aside: Where to move what else is there; None raises.

    Raises:
        OSError: If something is there, or the disk fails.
    """
    sync_folder(temporary)
    if aside is not None and os.path.lexists(target):
        os.rename(target, aside)
    os.rename(temporary, target)
    sync_folder(target.parent)


def _prefix(target: Path) -> str:
    return f"{_TEMPORARY}{target.name}-"


class closing(contextlib.AbstractContextManager[None]):
    """Close a file descriptor at the end of a block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)


def _row_bytes(entry: TensorEntry) -> int:
    return entry.num_bytes // entry.shape[0] if entry.shape and entry.shape[0] else entry.num_bytes

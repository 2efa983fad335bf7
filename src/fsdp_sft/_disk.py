"""Files and folders that appear complete or not at all.

Files are hashed while they are written, forced to the disk (fsync), and read by position. A folder is filled
under a temporary name beside its own and appears by one rename. The next job deletes what a killed one has
left.
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
    force_to_disk,
    open_file,
    read_at,
    read_header,
    write_at,
)
from fsdp_sft.errors import CheckpointCorruptError, SafetensorsError

_BUFFER_BYTES = 16 << 20  # written or read at once
_TEMPORARY = ".tmp-"  # what the names of unfinished folders begin with


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file.

    Attributes:
        size: Size in bytes.
        sha256: SHA-256 of all its bytes, in hexadecimal.
    """

    size: int
    sha256: str


@dataclass(frozen=True)
class Deferred:
    """A tensor that is read from somewhere only when it is its turn to be written.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype of its elements.
        read: Function that returns the tensor, in CPU memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor | Deferred], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a safetensors file and force it to the disk (fsync). A thread hashes it meanwhile.

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
        force_to_disk(fd)
        return FileRecord(header.file_bytes, hasher.hexdigest())


def write_early(fd: int, offset: int, view: memoryview) -> None:
    """Write, and let the disk begin at once, so that the fsync at the end has little left to wait for."""
    for first in range(0, len(view), _BUFFER_BYTES):
        piece = view[first : first + _BUFFER_BYTES]
        write_at(fd, offset + first, piece)
        if hasattr(os, "posix_fadvise"):
            # On Linux this starts writing dirty pages to the disk. It also drops clean pages, but there are
            # none yet in what has just been written.
            os.posix_fadvise(fd, offset + first, len(piece), os.POSIX_FADV_DONTNEED)


class _Hasher:
    """SHA-256 in a thread of its own, in parallel with the writing, since hashlib releases the GIL.

    It is not an executor, because executors refuse work once the interpreter has begun to wait for its
    threads. That is when the last asynchronous save of a program may still be running.
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
        """Start hashing ``view``, which must not change until ``wait`` returns."""
        self._work.put(view)

    def wait(self) -> None:
        """Return when the view given to ``begin`` has been hashed."""
        self._done.acquire()

    def hexdigest(self) -> str:
        """The digest of everything hashed so far."""
        return self._digest.hexdigest()

    def _run(self) -> None:
        while (view := self._work.get()) is not None:
            self._digest.update(view)
            self._done.release()


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a small file and force it to the disk (fsync)."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with closing(fd):
        write_at(fd, 0, memoryview(data))
        force_to_disk(fd)
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def check_room(folder: Path, need: int, what: str) -> None:
    """Refuse to begin what the file system has no room for.

    Args:
        folder: An existing folder of the file system.
        need: Bytes that will be written.
        what: What will be written, for the error.

    Raises:
        OSError: ``ENOSPC``, with the need and what is free.
    """
    usage = shutil.disk_usage(folder)
    if usage.total > 0 and usage.free < need:  # a file system without a size says that it has none
        raise OSError(
            errno.ENOSPC,
            f"{what} takes {need / 2**30:,.2f} GiB and {folder} has {usage.free / 2**30:,.2f} GiB free: make "
            "room, or take another folder",
        )


def full_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path, ``~`` standing for the home folder as in a shell."""
    return Path(path).expanduser().absolute()


def sync_file(path: Path) -> None:
    """Force a file that has been written to the disk (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    with closing(fd):
        force_to_disk(fd)


def sync_folder(path: Path) -> None:
    """Force a folder's entries (its names) to the disk, if the file system can do that for folders.

    Without it a file's contents may survive a loss of power while its name does not.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    with closing(fd):
        try:
            force_to_disk(fd)
        except OSError as error:
            # Mounts of object stores and some network file systems cannot sync folders, and answer so. For
            # files none of them does: there every error counts.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise


def renames_whole(folder: Path) -> bool:
    """Whether renaming a folder below ``folder`` is one step, which keeps its files.

    Mounts of object stores rename a folder by copying and deleting its files. Afterwards these are other
    files, as their inode numbers show, and meanwhile another process may see only a part of them.
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
    """All bytes of a regular file.

    Raises:
        CheckpointCorruptError: If it is missing, a symbolic link, or longer than ``most`` bytes.
        OSError: If this process may open no more files, or may not open this one.
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
    """How a file below ``folder`` differs from its record; None if it does not.

    Only ``folder`` itself may be a symbolic link; the file, and a folder between the two, may not.

    Raises:
        OSError: If this process may open no more files, or may not open this one.
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

    If the destination has the stored dtype and is contiguous in CPU memory, bytes are read straight into it;
    otherwise they pass through one buffer, which is reused. The reader keeps at most a quarter of the files
    open that this process may open: a step saved by 1,024 ranks can have 2,048 files.

    Attributes:
        bytes_read: Tensor bytes read so far.

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
        """The header of a file, checked and remembered.

        Raises:
            CheckpointCorruptError: If the file or its header is damaged or missing.
            OSError: If this process may open no more files, or may not open this one.
        """
        if file not in self._headers:
            try:
                self._headers[file] = read_header(self._descriptor(file))
            except (OSError, SafetensorsError) as error:
                blame_no_file(error, self._folder / file)
                raise CheckpointCorruptError(f"{self._folder / file} cannot be read: {error}") from error
        return self._headers[file]

    def read(self, file: str, name: str, out: torch.Tensor, part: Box | None = None) -> None:
        """Read a stored tensor, or a part of it, into ``out``.

        Args:
            file: Name of the file below the folder.
            name: Name of the tensor in the file.
            out: Tensor to fill, of the part's shape, on any device; values are cast to its dtype.
            part: Part of the stored tensor; None reads all of it.

        Raises:
            CheckpointCorruptError: If the bytes cannot be read.
            OSError: If this process may open no more files, or may not open this one.
        """
        entry = self.header(file).entries[name]
        try:
            with torch.no_grad():
                self._read(self._descriptor(file), entry, part or whole(entry.shape), out)
        except (OSError, SafetensorsError) as error:
            blame_no_file(error, self._folder / file)
            raise CheckpointCorruptError(f"{self._folder / file} cannot be read: {error}") from error

    def _descriptor(self, file: str) -> int:
        """The open file; if there are too many, the one that was not used for longest is closed."""
        fd = self._descriptors.pop(file, None)
        if fd is None:
            while len(self._descriptors) >= self._most_open:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            fd = open_file(self._folder / file)
        self._descriptors[file] = fd
        return fd

    def _read(self, fd: int, entry: TensorEntry, part: Box, out: torch.Tensor) -> None:
        """Read a part as contiguous runs: whole rows at once, else row by row, each row in the same way."""
        if part.shape[1:] == entry.shape[1:]:  # one run of bytes in the file
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
        """Fill ``out`` from one contiguous run of the file."""
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
    """Fill ``out``, the box ``box`` of a tensor, from the files that store the tensor's parts.

    Args:
        reader: Reader of the files.
        name: Name of the tensor in the files.
        chunks: (file, box of the tensor that it stores) pairs; they must cover ``box``.
        box: Box of the tensor that is wanted.
        out: Tensor to fill, of the box's shape.
    """
    for file, chunk in chunks:
        common = chunk.intersect(box)
        if common is not None and common.numel:
            reader.read(file, name, part_of(out, common.relative_to(box)), common.relative_to(chunk))


def temporary_beside(target: Path) -> Path:
    """A new name in the same folder for something that will be renamed to ``target`` when it is complete."""
    return target.with_name(f"{_prefix(target)}{uuid.uuid4().hex}")


def unsound_beside(target: Path) -> Path:
    """A new name for what is at ``target`` and damaged: it makes room, but is kept to be looked at."""
    return target.with_name(f".unsound-{target.name}-{uuid.uuid4().hex}")


def sweep(target: Path) -> None:
    """Delete unfinished folders that killed jobs have left on their way to ``target``."""
    for stale in target.parent.glob(
        f"{glob.escape(_prefix(target))}{'[0-9a-f]' * 32}"
    ):  # the digits leave out what is on its way to "<target>-2"
        shutil.rmtree(stale, ignore_errors=True)


def sweep_all(root: Path) -> None:
    """Delete the unfinished folders of all targets below ``root``; other files with such names stay."""
    for stale in root.glob(f"{_TEMPORARY}*-{'[0-9a-f]' * 32}"):
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale, ignore_errors=True)


def publish(temporary: Path, target: Path, *, aside: Path | None = None) -> None:
    """Let a finished folder appear under its name, complete or not at all.

    Args:
        temporary: The finished folder, whose files are on the disk already.
        target: Name under which it is to appear; an empty folder there is replaced.
        aside: Name to which anything else at ``target`` is moved; None raises if there is something.

    Raises:
        OSError: If something is at ``target`` and cannot be moved aside, or the disk fails.
    """
    # The names inside the folder reach the disk before the folder gets its own name: after a loss of power no
    # folder of that name may lack a file. The last fsync makes the rename durable, so that a caller who has
    # been told that the folder is there will find it.
    sync_folder(temporary)
    if aside is not None and os.path.lexists(target):
        os.rename(target, aside)
    os.rename(temporary, target)
    sync_folder(target.parent)


def _prefix(target: Path) -> str:
    """What the temporary names of a target begin with; 32 hexadecimal digits follow."""
    return f"{_TEMPORARY}{target.name}-"


class closing(contextlib.AbstractContextManager[None]):
    """Close a file descriptor at the end of a block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)


def _row_bytes(entry: TensorEntry) -> int:
    """Bytes of one row (an index of the first dimension) of a stored tensor."""
    return entry.num_bytes // entry.shape[0] if entry.shape and entry.shape[0] else entry.num_bytes

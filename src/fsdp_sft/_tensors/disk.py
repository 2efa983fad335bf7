"""Files and folders that appear complete or not at all.

Files are hashed while they are written, forced to the disk (fsync), and read by position. A folder is filled
under a temporary name beside its final one, and renamed when it is complete. The next job deletes what a
killed one has left.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.safetensors import advise, bytes_of, create, force_to_disk, open_file, write_at
from fsdp_sft.errors import CheckpointCorruptError, CheckpointFormatError

_BUFFER_BYTES = 16 << 20  # written or read at once
_WORTH_A_THREAD = 1 << 18  # bytes; fewer are hashed in less time than a thread takes to start
_TEMPORARY = ".tmp-"  # prefix of unfinished folders


@dataclass(frozen=True)
class FileRecord:
    """A file as a manifest records it.

    Attributes:
        size: Size in bytes.
        sha256: SHA-256 of all its bytes, in hexadecimal.
    """

    size: int
    sha256: str


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a safetensors file and force it to the disk (fsync). A thread hashes it meanwhile.

    Memory: One of the tensors in CPU memory, if it is not there already.
    """
    described = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    fd, header, head = create(path, described, metadata)
    digest = hashlib.sha256(head)
    with os.fdopen(fd, "r+b", buffering=0):
        for name, entry in header.entries.items():
            staged = tensors[name].detach().to("cpu").contiguous()
            view = bytes_of(staged)
            with _hashed(digest, view):
                write_early(fd, entry.start, view)
        force_to_disk(fd)
    return FileRecord(header.file_bytes, digest.hexdigest())


def write_early(fd: int, offset: int, view: memoryview) -> None:
    """Write, and start writeback at once, so that the fsync at the end has little left to wait for."""
    for first in range(0, len(view), _BUFFER_BYTES):
        piece = view[first : first + _BUFFER_BYTES]
        write_at(fd, offset + first, piece)
        # On Linux this starts writing dirty pages to the disk. It also drops clean pages, but there are none
        # yet in what has just been written.
        advise(fd, offset + first, len(piece), "POSIX_FADV_DONTNEED")


@contextlib.contextmanager
def _hashed(digest: "hashlib._Hash", view: memoryview) -> Iterator[None]:
    """Hash ``view`` in a thread while the block writes it (hashlib releases the GIL).

    An executor would refuse work once the interpreter has begun to wait for its threads, when a program's
    last asynchronous save may still be running.
    """
    if len(view) < _WORTH_A_THREAD:
        digest.update(view)
        yield
        return
    thread = threading.Thread(target=digest.update, args=(view,), name="fsdp_sft-hash")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a small file and force it to the disk (fsync)."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(fd, "wb", buffering=0):
        write_at(fd, 0, memoryview(data))
        force_to_disk(fd)
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def check_room(folder: Path, need: int, what: str) -> None:
    """Check that the file system has room for what will be written.

    Args:
        folder: An existing folder of the file system.
        need: Bytes that will be written.
        what: What will be written, for the error.

    Raises:
        OSError: If it has not (``ENOSPC``); the message says how much is needed and how much is free.
    """
    usage = shutil.disk_usage(folder)
    if usage.total > 0 and usage.free < need:  # some file systems report a size of 0
        raise OSError(
            errno.ENOSPC,
            f"{what} takes {need / 2**30:,.2f} GiB and {folder} has {usage.free / 2**30:,.2f} GiB free: make "
            "room, or take another folder",
        )


def full_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path, with ``~`` expanded as in a shell."""
    return Path(path).expanduser().absolute()


def sync_file(path: Path) -> None:
    """Force a file that has been written to the disk (fsync)."""
    with open(path, "rb") as file:
        force_to_disk(file.fileno())


def sync_folder(path: Path) -> None:
    """Force a folder's entries (its names) to the disk, if the file system can do that for folders.

    Without it a file's contents may survive a loss of power while its name does not.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        force_to_disk(fd)
    except OSError as error:
        # Mounts of object stores and some network file systems cannot sync folders, and say so. All of
        # them can sync files, so for files every error counts.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def read_bytes(path: Path, most: int) -> bytes:
    """All bytes of a regular file.

    Raises:
        CheckpointCorruptError: If it is missing, a symbolic link, or longer than ``most`` bytes.
        OSError: If this process may open no more files, or may not open this one.
    """
    try:
        with os.fdopen(open_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise CheckpointFormatError(f"it has {size} bytes, more than {most}")
            return file.read(size)
    except (OSError, CheckpointFormatError) as error:
        blame_no_file(error, path)
        raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error


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
            with os.fdopen(open_file(path), "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                    return "has other contents than were written (SHA-256 differs)"
    except FileNotFoundError:
        return "is missing"
    except (OSError, CheckpointFormatError) as error:
        blame_no_file(error, path)
        return f"cannot be read: {error}"
    return None


def temporary_beside(target: Path) -> Path:
    """A new name beside ``target`` for what will be renamed to it when complete."""
    return target.with_name(f"{_TEMPORARY}{target.name}-{uuid.uuid4().hex}")


def unsound_beside(target: Path) -> Path:
    """A new name beside a damaged ``target``, which is moved there and kept for inspection."""
    return target.with_name(f".unsound-{target.name}-{uuid.uuid4().hex}")


def sweep(root: Path, target: str = "") -> None:
    """Delete the unfinished folders below ``root`` that killed jobs have left; files of such names stay.

    Args:
        root: The folder in which they are.
        target: Name that they were to get; any if it is empty.
    """
    # The digits exclude the unfinished folders for "<target>-2".
    name = glob.escape(target) or "*"
    for stale in root.glob(f"{_TEMPORARY}{name}-{'[0-9a-f]' * 32}"):
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale, ignore_errors=True)


def publish(temporary: Path, target: Path, *, aside: Path | None = None) -> None:
    """Rename a finished folder to its final name, under which it appears complete or not at all.

    Args:
        temporary: The finished folder, whose files are on the disk already.
        target: Name under which it is to appear; an empty folder there is replaced.
        aside: Name to which anything else at ``target`` is moved; None raises if there is something.

    Raises:
        OSError: If something is at ``target`` and cannot be moved aside, or the disk fails.
    """
    # The names inside the folder reach the disk before the folder gets its final name, so that after a loss
    # of power no folder of that name lacks a file. The last fsync makes the rename itself durable.
    sync_folder(temporary)
    if aside is not None and os.path.lexists(target):
        os.rename(target, aside)
    os.rename(temporary, target)
    sync_folder(target.parent)

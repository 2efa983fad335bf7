"""Positional reads of boxes of stored tensors straight into shards, cast on the way, in bounded memory.

For a shard on the host a quarter of a MiB at a time is read into a reused buffer and copied out, while the
bytes, and the memory just mapped for the values, are still in the core's cache. Otherwise every byte would
travel to memory and back twice more. What needs no cast and is contiguous, in the file and in host memory, is
read straight into the shard. Fresh memory is mapped by the piece: a page fault for every 4 KiB costs as much
as reading and casting them.
"""

import ctypes
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._process.streams import adopt, host_buffer, stream_of_caller
from fsdp_sft._ranks.init import ranks_on_host
from fsdp_sft._tensors.safetensors import advise, bytes_of, open_file, read_at
from fsdp_sft._tensors.stored import ByteRange, Read, copied_bytes
from fsdp_sft.errors import CheckpointFormatError

MAX_WORKERS = 4  # threads that read
_AHEAD = 8  # reads that the system is asked to fetch beyond the one being done: up to 64 MiB
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def threads_that_read() -> int:
    """Number of threads for this rank to read with: its share of the host's CPUs, at most ``MAX_WORKERS``.

    Fewer CPUs than the host has are this rank's own, as where Slurm has bound each rank to some.
    """
    cpus = len(os.sched_getaffinity(0))
    return max(1, min(MAX_WORKERS, cpus // (ranks_on_host() if cpus == os.cpu_count() else 1)))


def do_reads(
    reads: Iterable[Read],
    *,
    workers: int = 1,
    progress: Callable[[int], None] = lambda _: None,
    damaged: type[Exception] = CheckpointFormatError,
) -> int:
    """Do all reads, in the order of files and bytes.

    Args:
        reads: Reads in any order, for the host and for one accelerator.
        workers: Number of threads.
        progress: Called with the bytes of each read, under a lock.
        damaged: Class of the error for a file that cannot be read.

    Returns:
        Number of bytes read.

    Raises:
        CheckpointFormatError: If a file ends early or cannot be opened (then it is ``damaged``), or tied
            tensors differ.
        OSError: If this process may open no more files, or may not open one of them.

    Memory: A buffer of a quarter of a MiB for each thread (for an accelerator a pinned one of 8 MiB), and the
        bytes and values of a read of several runs.
    """
    ordered = sorted(reads, key=lambda read: (read.runs[0].file, read.runs[0].start))
    device = next((read.place.device for read in ordered if not read.place.is_cpu), torch.device("cpu"))
    reader = _Reader(ordered, device, progress, damaged)
    try:
        if workers == 1:
            reader.work()
        else:
            with ThreadPoolExecutor(workers, initializer=adopt, initargs=(stream_of_caller(device),)) as pool:
                for done in [pool.submit(reader.work) for _ in range(workers)]:
                    done.result()
    finally:
        for fd in reader.descriptors.values():
            os.close(fd)
    return sum(read.num_bytes for read in ordered)


def map_pages(memory: torch.Tensor) -> None:
    """Map the pages of contiguous host memory that will be written to, in one call; values in them stay.

    Advice, which other systems and older kernels ignore: the first write to each page maps it then.
    """
    if _LIBC is not None and memory.is_cpu:
        start = memory.data_ptr() & -os.sysconf("SC_PAGE_SIZE")
        # 23: MADV_POPULATE_WRITE of <linux/mman.h>, since Linux 5.14
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(memory.data_ptr() + memory.nbytes - start), 23)


class _Reader:
    """Files and the queue of reads, shared by the threads of one load."""

    def __init__(
        self,
        reads: list[Read],
        device: torch.device,
        progress: Callable[[int], None],
        damaged: type[Exception],
    ) -> None:
        self._reads, self._device = reads, device
        self._progress, self._damaged = progress, damaged
        self._taken, self._lock = 0, threading.Lock()
        self._left = Counter(run.file for read in reads for run in read.runs)  # runs of each file
        self.descriptors: dict[Path, int] = {}

    def work(self) -> None:
        """Read until nothing is left or another thread has failed."""
        buffer = host_buffer((copied_bytes(self._device),), torch.uint8, self._device)
        view = bytes_of(buffer)  # once: for each piece it would take a fifth of the time of reading one
        try:
            with torch.no_grad():
                while (read := self._next()) is not None:
                    self._do(read, buffer, view)
                    self._done(read)
        except BaseException:
            with self._lock:
                self._taken = len(self._reads)
            raise

    def _next(self) -> Read | None:
        """Take the next read and open its files, and let the system fetch a later one; None at the end."""
        with self._lock:
            if self._taken == len(self._reads):
                return None
            read = self._reads[self._taken]
            self._taken += 1
            for ahead in self._reads[self._taken : self._taken + _AHEAD][0 if self._taken == 1 else -1 :]:
                for run in ahead.runs:
                    advise(self._descriptor(run.file), run.start, run.num_bytes, "POSIX_FADV_WILLNEED")
            for run in read.runs:
                self._descriptor(run.file)
            return read

    def _descriptor(self, file: Path) -> int:
        """Descriptor of a file, which is opened when it is first needed."""
        if file not in self.descriptors:
            try:
                self.descriptors[file] = open_file(file)
            except (OSError, CheckpointFormatError) as error:
                blame_no_file(error, file)
                raise self._damaged(f"{file} cannot be opened: {error}") from None
            advise(self.descriptors[file], 0, 0, "POSIX_FADV_RANDOM")
        return self.descriptors[file]

    def _done(self, read: Read) -> None:
        """Close a file when all of it has been read: a step that 1,024 ranks saved has 1,024 files."""
        with self._lock:
            self._progress(read.num_bytes)
            for run in read.runs:
                self._left[run.file] -= 1
                if not self._left[run.file]:
                    os.close(self.descriptors.pop(run.file))

    def _fetch(self, run: ByteRange, key: str, view: memoryview, skipped: int = 0) -> None:
        """Fill host memory with a run's bytes, from byte ``skipped`` of it on."""
        try:
            read_at(self.descriptors[run.file], run.start + skipped, view)
        except (OSError, CheckpointFormatError) as error:
            blame_no_file(error, run.file)
            raise self._damaged(
                f"{run.file} cannot be read at byte {run.start + skipped} ({key!r}): {error}; is it complete?"
            ) from None

    def _stream(self, read: Read, buffer: torch.Tensor, view: memoryview, dtype: torch.dtype) -> None:
        """Do a read of elements without gaps, a piece at a time: straight to its place, or by the buffer."""
        (run,), place, values = read.runs, read.place, buffer.view(dtype)
        straight = bytes_of(place) if place.is_cpu and place.dtype == dtype else None
        for first in range(0, len(place), len(values)):
            part, at = place[first : first + len(values)], first * dtype.itemsize
            end = at + len(part) * dtype.itemsize
            if straight is not None:
                map_pages(part)
                self._fetch(run, read.key, straight[at:end], at)
            else:
                self._fetch(run, read.key, view[: end - at], at)
                map_pages(part)
                part.copy_(values[: len(part)].to(place.device))

    def _do(self, read: Read, buffer: torch.Tensor, view: memoryview) -> None:
        """Fetch the bytes of a read, and copy their values to their place, cast to its dtype; or compare."""
        if read.stored_as is not None:
            self._stream(read, buffer, view, read.stored_as)
            return
        raws = []
        for run in read.runs:
            fits = len(read.runs) == 1 and run.num_bytes <= len(buffer)
            memory = buffer[: run.num_bytes] if fits else torch.empty(run.num_bytes, dtype=torch.uint8)
            self._fetch(run, read.key, bytes_of(memory))
            # The device casts. The host waits for the copy, and another thread reads meanwhile.
            raws.append(memory.to(read.place.device))
        values = read.make(raws)
        if not read.compare:
            read.place.copy_(values)
        elif not torch.equal(read.place.nan_to_num(), values.to(read.place.dtype).nan_to_num()):
            raise CheckpointFormatError(
                f"the checkpoint holds different values for {read.key!r} and for the tensor it is tied to; "
                "to keep the two apart, build_meta_model(..., tie_word_embeddings=False); a module of your "
                "own must not tie them"
            )

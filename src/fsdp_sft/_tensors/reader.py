"""Positional reads of boxes of stored tensors straight into shards, cast on the way, in bounded memory.

About 1 MiB at a time is read into a reused buffer. On the host it is copied out a quarter at a time, while
the bytes, and the memory just mapped for the values, are still in the core's cache. Otherwise every byte
would travel to memory and back twice more.

``Read``s that are neighbours in a file are fetched at once. What needs no cast and is contiguous, in the file
and in host memory, is read straight into the shard.
"""

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._process.streams import CallerStream, host_buffer
from fsdp_sft._ranks.init import ranks_on_host
from fsdp_sft._tensors.safetensors import bytes_of, expect, expect_parts, open_file, read_at
from fsdp_sft._tensors.stored import ByteRange, Read, copied_bytes
from fsdp_sft.errors import CheckpointFormatError

# Neighbours in a file, read at once.

_ALIGNMENT = 16  # a stored element must begin at a multiple of its size in the buffer too


class Batch(NamedTuple):
    """Reads that are neighbours in a file and fetched at once, or a single one."""

    reads: list[Read]
    runs: tuple[ByteRange, ...]


def batches_of(reads: Iterable[Read], limit: int) -> Iterator[Batch]:
    """Reads in the order of the files, joined with their neighbours as far as ``limit`` bytes go."""
    batch: list[Read] = []
    for read in reads:
        if batch and not _continues(batch, read, limit):
            yield _joined(batch)
            batch = []
        batch.append(read)
    if batch:
        yield _joined(batch)


def _continues(batch: list[Read], read: Read, limit: int) -> bool:
    """Whether a read begins where the last of a batch ends, and may be fetched with it."""
    if len(read.runs) > 1 or len(batch[0].runs) > 1 or read.is_direct or batch[0].is_direct:
        return False
    first, last, run = batch[0].runs[0], batch[-1].runs[0], read.runs[0]
    return (
        (run.file, run.start) == (last.file, last.start + last.num_bytes)
        and run.start + run.num_bytes - first.start <= limit
        and (run.start - first.start) % _ALIGNMENT == 0
    )


def _joined(reads: list[Read]) -> Batch:
    if len(reads) == 1:
        return Batch(reads, reads[0].runs)
    first, last = reads[0].runs[0], reads[-1].runs[0]
    return Batch(reads, (ByteRange(first.file, first.start, last.start + last.num_bytes - first.start),))


# The reads.

MAX_WORKERS = 4  # threads that read
PIECE_BYTES = 1 << 20  # read at once for a shard on the host
_BATCHES_AHEAD = 8  # how far ahead of the batch being read the system is asked to fetch
_COUNTED_ELEMENTS = 1 << 20  # checked at once when NaN and infinity are counted; each takes 7 bytes


def threads_that_read() -> int:
    """Number of threads for this rank to read with: its share of the host's CPUs, at most ``MAX_WORKERS``."""
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // ranks_on_host()))


def do_reads(
    reads: Iterable[Read],
    *,
    workers: int = 1,
    progress: Callable[[int], None] = lambda _: None,
    damaged: type[Exception] = CheckpointFormatError,
) -> int:
    """Do all reads, one device after the other, in the order of files and bytes.

    Args:
        reads: Reads in any order.
        workers: Number of threads.
        progress: Called with the bytes of each read, under a lock.
        damaged: Class of the error for a file that cannot be read.

    Returns:
        Number of bytes read.

    Raises:
        CheckpointFormatError: If a file ends early or cannot be opened (then it is ``damaged``), or tied
            tensors differ; and if a parameter's values are not finite.
        OSError: If this process may open no more files, or may not open one of them.

    Memory: One buffer of about 1 MiB for each thread (for an accelerator two pinned ones of 8 MiB), and the
        bytes and values of a read of several runs.
    """
    by_device: dict[torch.device, list[Read]] = {}
    for read in reads:
        by_device.setdefault(read.place.device, []).append(read)
    count = 0
    for device, own in by_device.items():
        own.sort(key=lambda read: (read.runs[0].file, read.runs[0].start))
        count += _read_for(device, own, workers, progress, damaged)
    return count


def _read_for(
    device: torch.device,
    reads: list[Read],
    workers: int,
    progress: Callable[[int], None],
    damaged: type[Exception],
) -> int:
    """Do the reads whose values belong on one device; the number of bytes read."""
    size = PIECE_BYTES if device.type == "cpu" else copied_bytes(device)
    caller = CallerStream.on(device)
    reader = _Reader(partial(_Stage, size, device, caller), [*batches_of(reads, size)], progress, damaged)
    try:
        if workers == 1:
            reader.work()
        else:
            with ThreadPoolExecutor(workers, initializer=caller.adopt) as pool:
                for done in [pool.submit(reader.work) for _ in range(workers)]:
                    done.result()
    finally:
        reader.close()
    return reader.bytes_read


class _Reader:
    """Files, the queue of reads and the count of bytes, shared by the threads of one load."""

    def __init__(
        self,
        make_stage: Callable[[], "_Stage"],
        batches: list[Batch],
        progress: Callable[[int], None],
        damaged: type[Exception],
    ) -> None:
        self.bytes_read = 0
        self._damaged = damaged
        self._make_stage = make_stage
        self._batches = batches
        self._taken = 0
        self._progress = progress
        self._left = Counter(run.file for batch in batches for run in batch.runs)  # runs of each file
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._failed = False

    def work(self) -> None:
        """Read until nothing is left or another thread has failed."""
        stage = self._make_stage()
        try:
            with torch.no_grad():
                while (batch := self._next()) is not None:
                    self._do(batch, stage)
                    self._done(batch)
            stage.finish()
        except BaseException:
            self._failed = True
            raise

    def _next(self) -> Batch | None:
        """Take the next batch and open its files, and let the system fetch a later one; None at the end."""
        with self._lock:
            if self._failed or self._taken == len(self._batches):
                return None
            batch = self._batches[self._taken]
            self._taken += 1
            for ahead in self._batches[self._taken : self._taken + _BATCHES_AHEAD][-1:]:
                for run in ahead.runs:
                    expect(self._descriptor(run.file), run.start, run.num_bytes)
            for run in batch.runs:
                self._descriptor(run.file)
            return batch

    def _descriptor(self, file: Path) -> int:
        """Descriptor of a file, which is opened when it is first needed."""
        if file not in self._descriptors:
            try:
                self._descriptors[file] = open_file(file)
            except (OSError, CheckpointFormatError) as error:
                blame_no_file(error, file)
                raise self._damaged(f"{file} cannot be opened: {error}") from None
            expect_parts(self._descriptors[file])
        return self._descriptors[file]

    def _done(self, batch: Batch) -> None:
        """Close a file when all of it has been read: a step that 1,024 ranks saved has 1,024 files."""
        with self._lock:
            for run in batch.runs:
                self._left[run.file] -= 1
                if not self._left[run.file]:
                    os.close(self._descriptors.pop(run.file))

    def _fetch(self, run: ByteRange, key: str, memory: memoryview) -> None:
        try:
            read_at(self._descriptors[run.file], run.start, memory)
        except (OSError, CheckpointFormatError) as error:
            blame_no_file(error, run.file)
            raise self._damaged(
                f"{run.file} cannot be read at byte {run.start} ({key!r}): {error}; is it complete?"
            ) from None
        with self._lock:
            self.bytes_read += run.num_bytes
            self._progress(run.num_bytes)

    def _do(self, batch: Batch, stage: "_Stage") -> None:
        """Fetch a batch, and deliver its values to their places in the shards."""
        first, run = batch.reads[0], batch.runs[0]
        if first.is_direct:
            self._fetch(run, first.key, bytes_of(first.place))
        elif len(batch.runs) > 1 or run.num_bytes > stage.size:
            raws = []
            for own in batch.runs:
                raw = torch.empty(own.num_bytes, dtype=torch.uint8)
                self._fetch(own, first.key, bytes_of(raw))
                raws.append(raw.to(first.place.device))
            _deliver(first, raws)
        else:
            self._fetch(run, first.key, stage.memory(run.num_bytes))
            staged = stage.staged(run.num_bytes)
            for read in batch.reads:
                at = read.runs[0].start - run.start
                _deliver(read, [staged[at : at + read.num_bytes]])
            stage.used()

    def close(self) -> None:
        """Close every file."""
        for fd in self._descriptors.values():
            os.close(fd)
        self._descriptors.clear()


class _Stage:
    """Host buffers used in turn: one is read into while the other is copied to the device.

    For shards on the host there is one, from which values are copied at once.
    """

    def __init__(self, size: int, device: torch.device, caller: CallerStream) -> None:
        buffers = 1 if device.type == "cpu" else 2
        self.size = size
        self._buffers = [host_buffer((size,), torch.uint8, device) for _ in range(buffers)]
        self._device = device
        self._caller = caller
        self._turn = 0
        self._events: list[torch.Event | None] = [None] * buffers

    def memory(self, num_bytes: int) -> memoryview:
        """The memory to read into, once the copy that used this buffer before is done."""
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        return bytes_of(self._buffers[self._turn][:num_bytes])

    def staged(self, num_bytes: int) -> torch.Tensor:
        """The bytes that were read, on the device, still in the checkpoint's dtype: the device casts them."""
        return self._buffers[self._turn][:num_bytes].to(self._device, non_blocking=True)

    def used(self) -> None:
        """Switch to the next buffer."""
        self._events[self._turn] = self._caller.record()
        self._turn = (self._turn + 1) % len(self._buffers)

    def finish(self) -> None:
        """Wait for copies that are still under way."""
        for event in self._events:
            if event is not None:
                event.synchronize()


def _deliver(read: Read, raws: list[torch.Tensor]) -> None:
    """Copy values to their place, cast to its dtype, and check them; or compare the two."""
    place, values = read.place, read.make(raws)
    if read.mode == "compare":
        check_same(read.key, place, values.to(place.dtype))
        return
    place.copy_(values)
    # A finite sum shows that all values are finite. A sum that is not may have overflowed, so the values are
    # then checked one by one. On an accelerator each check would wait for the device: its shards are checked
    # once, after the load.
    if read.check_finite and place.is_cpu and not math.isfinite(place.sum().item()):
        check_all_finite({read.name: place})


def check_all_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse NaN and infinity in floating-point tensors, all of them on one device.

    Raises:
        CheckpointFormatError: If a tensor has such values; the message names the first one.

    Memory: A few bytes on the device for each tensor, and 8 MiB where there is something to count. The host
        waits for the device once.
    """
    filled = {name: values.detach() for name, values in tensors.items() if values.numel()}
    # Minimum and maximum are enough: both are NaN if any value is, and one of them is infinite if any is.
    extremes = [torch.stack(torch.aminmax(values)).isfinite() for values in filled.values()]
    sound = torch.stack(extremes).all(1).tolist() if extremes else []
    for (name, values), is_sound in zip(filled.items(), sound, strict=True):
        if not is_sound:
            raise CheckpointFormatError(
                f"{name!r} has {_count_non_finite(values)} values in the checkpoint that are NaN or infinite "
                f"in {values.dtype}; load_weights(check_finite=False) takes them"
            )


def _count_non_finite(values: torch.Tensor) -> int:
    """How many values are NaN or infinite."""
    flat = values.reshape(-1)  # copies a tensor that is not contiguous; an error is raised anyway
    return sum(int((~torch.isfinite(piece)).sum()) for piece in flat.split(_COUNTED_ELEMENTS))


def check_same(name: str, values: torch.Tensor, stored: torch.Tensor) -> None:
    """Refuse a checkpoint that holds different values for the two names of a tied tensor.

    Raises:
        CheckpointFormatError: If the values differ; the message names the tensor.
    """
    if not torch.equal(values, stored) and not torch.equal(values.nan_to_num(), stored.nan_to_num()):
        raise CheckpointFormatError(
            f"the checkpoint holds different values for {name!r} and for the tensor it is tied to; to keep "
            "the two apart, build_meta_model(..., tie_word_embeddings=False); a module of your own must not "
            "tie them"
        )

"""Positional reads of boxes of stored tensors straight into shards, cast on the way, in bounded memory.

About 1 MiB at a time is read into a reused buffer. On the host it is copied out a quarter at a time, while
the bytes, and the memory just mapped for the values, are still in the core's cache. Otherwise every byte
would travel to memory and back twice more.

A ``Job`` is a box of one stored tensor and the part of a shard that it fills. Jobs are cut into segments that
fit the buffer, and segments that are neighbours in a file are joined into batches, each of which is one read.
What needs no cast and is contiguous, in the file and in host memory, is read straight into the shard.

A ``Computation`` is a box of values that are stored in another form, such as packed bytes and scales: its
byte ranges are read as they are, and a function computes the values from them.
"""

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._process.streams import CallerStream, host_buffer
from fsdp_sft._ranks.init import ranks_on_host
from fsdp_sft._tensors.safetensors import bytes_of, expect, expect_parts, open_file, read_at
from fsdp_sft._tensors.stored import ByteRange, Computation, Ints, Job
from fsdp_sft.errors import CheckpointFormatError

# Jobs cut into segments that fit one read, and segments adjacent in a file joined into one read.

_DIRECT_BYTES = 16 << 20  # read at once straight to its place
_MIN_RUN_BYTES = 512  # runs shorter than this are read together, with the gaps between them
_ALIGNMENT = 16  # a stored element must begin at a multiple of its size in the buffer too


@dataclass(slots=True)
class Segment:
    """A part of a job that one read of bounded size fetches."""

    job: Job
    start: int  # byte of the file
    num_bytes: int  # from the first byte that is needed to one past the last
    size: Ints
    stride: Ints
    dest_stride: Ints
    dest_offset: int  # first element in the storage of the job's dest

    def place(self) -> torch.Tensor:
        """The view of the shard that this segment fills."""
        return self.job.dest.as_strided(self.size, self.dest_stride, self.dest_offset)

    def values(self, raw: torch.Tensor) -> torch.Tensor:
        """The segment's elements among the bytes that were read for it."""
        return raw.view(self.job.dtype).as_strided(self.size, self.stride)


class Batch:
    """Segments that are adjacent in a file and fetched by one read."""

    def __init__(self, segments: list[Segment]) -> None:
        self.segments = segments
        self.key = segments[0].job.key
        start, last = segments[0].start, segments[-1]
        self.runs = (ByteRange(segments[0].job.file, start, last.start + last.num_bytes - start),)


def segments_of(job: Job, limit: int) -> Iterator[Segment]:
    """A job's segments, each of at most ``limit`` bytes, or 16 MiB if read straight into the shard."""
    limit = _DIRECT_BYTES if job.is_direct else limit
    dims = _merged(job)
    yield from _cut(job, job.start, dims, int(job.dest.storage_offset()), limit)


def _merged(job: Job) -> list[tuple[int, int, int]]:
    """(size, stored stride, shard stride) of each dimension, in descending order of the stored stride.

    Neighbouring dimensions become one where both the file and the shard go through them without a gap.
    """
    dims = [d for d in zip(job.size, job.stride, job.dest.stride(), strict=True) if d[0] > 1]
    dims.sort(key=lambda d: -d[1])
    merged: list[tuple[int, int, int]] = []
    for size, step, dest_step in dims:
        if merged and merged[-1][1] == size * step and merged[-1][2] == size * dest_step:
            merged[-1] = (merged[-1][0] * size, step, dest_step)
        else:
            merged.append((size, step, dest_step))
    return merged or [(1, 1, 1)]


def _cut(
    job: Job, start: int, dims: list[tuple[int, int, int]], dest_offset: int, limit: int
) -> Iterator[Segment]:
    """Cut a box along its outermost dimension until one read fits the buffer and wastes little.

    "Wastes little" means that at least 95 % of the bytes read are needed, or that what is skipped or needed
    is too short to be worth a separate read.
    """
    itemsize = job.dtype.itemsize
    (size, step, dest_step), inner = dims[0], dims[1:]
    inner_span = 1 + sum((n - 1) * s for n, s, _ in inner)  # from first to last element of one row
    inner_bytes = inner_span * itemsize
    needed = math.prod(n for n, _, _ in inner)  # elements of one row that belong to the box
    # One read for several rows wastes little, although it includes the gaps between them.
    dense = needed * 20 >= step * 19 or needed * itemsize < _MIN_RUN_BYTES
    fits = (inner_bytes <= limit and needed * 20 >= inner_span * 19) or inner_bytes < _MIN_RUN_BYTES
    if fits:
        rows = max(1, (limit - inner_bytes) // (step * itemsize) + 1) if dense else 1
        for at in range(0, size, rows):
            count = min(rows, size - at)
            yield Segment(
                job,
                start + at * step * itemsize,
                ((count - 1) * step + inner_span) * itemsize,
                (count, *(n for n, _, _ in inner)),
                (step, *(s for _, s, _ in inner)),
                (dest_step, *(d for _, _, d in inner)),
                dest_offset + at * dest_step,
            )
        return
    for index in range(size):
        yield from _cut(job, start + index * step * itemsize, inner, dest_offset + index * dest_step, limit)


def batches_of(segments: list[Segment], limit: int) -> Iterator[list[Segment]]:
    """Segments joined with their neighbours in the file, as far as one read of ``limit`` bytes can go."""
    batch: list[Segment] = []
    for segment in segments:
        if batch:
            first, last = batch[0], batch[-1]
            end = segment.start + segment.num_bytes
            if (
                not (first.job.is_direct or segment.job.is_direct)
                and segment.job.file == first.job.file
                and segment.start == last.start + last.num_bytes
                and end - first.start <= limit
                and (segment.start - first.start) % _ALIGNMENT == 0
            ):
                batch.append(segment)
                continue
            yield batch
        batch = [segment]
    if batch:
        yield batch


# The reads.

MAX_WORKERS = 4  # threads that read
PIECE_BYTES = 1 << 20  # read at once for a shard on the host
_COPIED_BYTES = 1 << 18  # copied out at once
_BATCHES_AHEAD = 8  # how far ahead of the batch being read the system is asked to fetch
_DEVICE_PIECE_BYTES = 8 << 20  # copies to an accelerator are faster in larger pieces
_COUNTED_ELEMENTS = 1 << 20  # checked at once when NaN and infinity are counted; each takes 7 bytes


def threads_that_read() -> int:
    """Number of threads for this rank to read with: its share of the host's CPUs, at most ``MAX_WORKERS``."""
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // ranks_on_host()))


def piece_bytes(device: torch.device) -> int:
    """Bytes to read at a time for a shard on ``device``."""
    return PIECE_BYTES if device.type == "cpu" else _DEVICE_PIECE_BYTES


def read_jobs(
    jobs: Iterable[Job | Computation],
    *,
    host_budget_bytes: int = 1 << 30,
    workers: int = 1,
    progress: Callable[[int], None] = lambda _: None,
    damaged: type[Exception] = CheckpointFormatError,
) -> int:
    """Do all jobs, one device after the other, in the order of files and bytes.

    Args:
        jobs: Jobs in any order.
        host_budget_bytes: Bytes that all buffers together may take.
        workers: Number of threads; fewer are used if the budget does not allow a buffer for each.
        progress: Called with the bytes of each read, under a lock.
        damaged: Class of the error for a file that cannot be read.

    Returns:
        Number of bytes read.

    Raises:
        CheckpointFormatError: If a file ends early or cannot be opened (then it is ``damaged``), or tied
            tensors differ; and if a parameter's values are not finite.
        OSError: If this process may open no more files, or may not open one of them.

    Memory: One buffer of about 1 MiB for each thread (for an accelerator two pinned ones of 8 MiB), and the
        bytes and values of a ``Computation``.
    """
    by_device: dict[torch.device, list[Job | Computation]] = {}
    for job in jobs:
        by_device.setdefault(job.dest.device, []).append(job)
    read = partial(_read_for, host_budget_bytes, workers, progress, damaged)
    return sum(read(device, own) for device, own in by_device.items())


def _read_for(
    host_budget_bytes: int,
    workers: int,
    progress: Callable[[int], None],
    damaged: type[Exception],
    device: torch.device,
    jobs: list[Job | Computation],
) -> int:
    """Do the jobs whose destinations are on one device; the number of bytes read."""
    size = min(piece_bytes(device), max(host_budget_bytes // 2, 1 << 12))
    copied = min(size, _COPIED_BYTES) if device.type == "cpu" else size
    segments = [segment for job in jobs if isinstance(job, Job) for segment in segments_of(job, copied)]
    segments.sort(key=lambda segment: (segment.job.file, segment.start))
    tasks: list[Batch | Computation] = [*map(Batch, batches_of(segments, size))]
    tasks += [job for job in jobs if isinstance(job, Computation)]
    tasks.sort(key=lambda task: (task.runs[0].file, task.runs[0].start))
    caller = CallerStream.on(device)
    buffers = 1 if device.type == "cpu" else 2
    reader = _Reader(partial(_Stage, buffers, size, device, caller), tasks, progress, damaged)
    workers = max(1, min(workers, host_budget_bytes // (size * buffers)))
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
        tasks: list[Batch | Computation],
        progress: Callable[[int], None],
        damaged: type[Exception],
    ) -> None:
        self.bytes_read = 0
        self._damaged = damaged
        self._make_stage = make_stage
        self._tasks = tasks
        self._taken = 0
        self._progress = progress
        self._left = Counter(run.file for task in tasks for run in task.runs)  # runs of each file
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._failed = False

    def work(self) -> None:
        """Read until nothing is left or another thread has failed."""
        stage = self._make_stage()
        try:
            with torch.no_grad():
                while (task := self._next()) is not None:
                    if isinstance(task, Computation):
                        self._compute(task)
                    else:
                        self._read_batch(task, stage)
                    self._done(task)
            stage.finish()
        except BaseException:
            self._failed = True
            raise

    def _next(self) -> Batch | Computation | None:
        """Take the next task and open its files, and let the system fetch a later one; None at the end."""
        with self._lock:
            if self._failed or self._taken == len(self._tasks):
                return None
            task = self._tasks[self._taken]
            self._taken += 1
            for ahead in self._tasks[self._taken : self._taken + _BATCHES_AHEAD][-1:]:
                for run in ahead.runs:
                    expect(self._descriptor(run.file), run.start, run.num_bytes)
            for run in task.runs:
                self._descriptor(run.file)
            return task

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

    def _done(self, task: Batch | Computation) -> None:
        """Close a file when all of it has been read: a step that 1,024 ranks saved has 1,024 files."""
        with self._lock:
            for run in task.runs:
                self._left[run.file] -= 1
                if not self._left[run.file]:
                    os.close(self._descriptors.pop(run.file))

    def _read(self, run: ByteRange, key: str, memory: memoryview) -> None:
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

    def _compute(self, task: Computation) -> None:
        """Read the bytes of a computation, and deliver the values computed from them."""
        raws = []
        for run in task.runs:
            raw = torch.empty(run.num_bytes, dtype=torch.uint8)
            self._read(run, task.key, bytes_of(raw))
            raws.append(raw.to(task.dest.device))
        _deliver(task, task.compute(raws), task.dest)

    def _read_batch(self, batch: Batch, stage: "_Stage") -> None:
        """Read a batch, and deliver its segments to their places in the shards."""
        (run,), first = batch.runs, batch.segments[0]
        if first.job.is_direct:
            self._read(run, batch.key, bytes_of(first.place()))
            return
        self._read(run, batch.key, stage.memory(run.num_bytes))
        staged = stage.staged(run.num_bytes)
        for segment in batch.segments:
            place = segment.place()
            at = segment.start - run.start
            _deliver(segment.job, segment.values(staged[at : at + segment.num_bytes]), place)
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

    def __init__(self, buffers: int, size: int, device: torch.device, caller: CallerStream) -> None:
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


def _deliver(job: Job | Computation, stored: torch.Tensor, dest: torch.Tensor) -> None:
    """Copy stored values to their place, cast to its dtype, and check them; or compare the two."""
    if job.mode == "compare":
        check_same(job.key, dest, stored.to(dest.dtype))
        return
    dest.copy_(stored)
    # A finite sum shows that all values are finite. A sum that is not may have overflowed, so the values are
    # then checked one by one. On an accelerator each check would wait for the device: its shards are checked
    # once, after the load.
    if job.check_finite and dest.is_cpu and not math.isfinite(dest.sum().item()):
        check_all_finite({job.name: dest})


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

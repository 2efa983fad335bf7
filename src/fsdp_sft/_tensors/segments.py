"""Jobs cut into segments that fit one read, and segments adjacent in a file joined into one read."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fsdp_sft._tensors.jobs import ByteRange, Job
from fsdp_sft._tensors.pieces import Ints

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

"""Mapping fresh host memory ahead of the writes, in ranges, and in large pages where these cost less.

The first write to each page of fresh memory is a page fault. Linux (5.14 and later) can map and clear a whole
range in one call, on request 2 MiB at a time, unless the transparent_hugepage setting is "never". Mapping
1 GB of memory that the machine has at hand takes 0.4 s in small pages and 0.12 s in large ones. In a virtual
machine whose host reclaims unused memory, large pages take 2.4 s, because the host has to give the memory
back first. Small ones still fit among other memory and take the usual 0.4 s (AMD EPYC, Firecracker). Both
prices of large pages occur within one load. So each load times what it maps, and takes large pages while they
are cheaper.

All calls are advice: where the system ignores it, the writes map the pages one by one, as usual.
"""

import ctypes
import functools
import mmap
import sys
import threading
import time
from collections import deque

import torch

# Advice of <linux/mman.h>, which is part of Linux's stable interface.
_HUGEPAGE = 14
_POPULATE_WRITE = 23
_LARGE_PAGE = 2 << 20  # on x86, and on Arm with pages of 4 KiB

_UNTRIED_BYTES = (
    32 << 20
)  # mapped in small pages before a large one is tried, and between two timings of small
_MOST_LOST = 0.05  # largest loss by trying large pages, as a fraction of the time in small ones
_WORTH = 0.75  # a large page that saves less than a quarter loses more, by leaving the core's cache
_SMALL_TIMINGS = 16  # whose mean is the price of small pages


class PageCosts:
    """Chooses the size of the next page by what those so far have cost.

    The loss of large pages against small ones is summed and never falls below zero (a cumulative sum, as in
    Page's test for a change). Large pages are taken while the sum is within 5 % of what all memory costs in
    small pages. So the total loss stays within that and one large page, whatever the system does, and earlier
    gains are not gambled away.

    Source: E. S. Page, Continuous Inspection Schemes, Biometrika 41 (1954).
    """

    def __init__(self) -> None:
        self._small: deque[tuple[int, float]] = deque(maxlen=_SMALL_TIMINGS)
        self._small_bytes = 0
        self._large_bytes = 0  # since small pages were last timed
        self._seconds_in_small = 0.0  # what all memory so far has cost, or would have cost, in small pages
        self._lost = 0.0

    def large_pays(self) -> bool:
        """Whether the next page should be a large one."""
        if self._small_bytes < _UNTRIED_BYTES or self._large_bytes >= _UNTRIED_BYTES:
            return False
        return self._lost <= _MOST_LOST * self._seconds_in_small

    def add(self, *, large: bool, num_bytes: int, seconds: float) -> None:
        """Note what mapping a range in large or small pages has cost."""
        if large:
            in_small = num_bytes * sum(s for _, s in self._small) / max(1, sum(n for n, _ in self._small))
            self._lost = max(0.0, self._lost + seconds - _WORTH * in_small)
            self._large_bytes += num_bytes
        else:
            in_small = seconds
            self._small.append((num_bytes, seconds))
            self._small_bytes += num_bytes
            self._large_bytes = 0
        self._seconds_in_small += in_small


class HostPages:
    """Maps the host memory of one load ahead of the writes; shared by the load's threads."""

    def __init__(self) -> None:
        self._costs = PageCosts()
        self._lock = threading.Lock()
        self._under_way: set[int] = set()  # addresses of the large pages that threads are mapping

    def prefault(self, tensor: torch.Tensor) -> None:
        """Map the pages that lie entirely within a contiguous host tensor, unless they are mapped already.

        A large page may go beyond the tensor, within its storage. Values that are there stay. On systems
        other than Linux nothing happens.
        """
        libc = _libc()
        if libc is None or not tensor.is_cpu or not tensor.is_contiguous():
            return
        storage = tensor.untyped_storage()
        within = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes() - _LARGE_PAGE + 1)
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.numel() * tensor.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        for page in range(start // _LARGE_PAGE * _LARGE_PAGE, end, _LARGE_PAGE):
            first, last = max(start, page), min(end, page + _LARGE_PAGE)
            # Going over mapped pages again would cost more than it saves. One in the middle stands for all.
            if not _any_mapped(libc, (first + last) // 2 // mmap.PAGESIZE * mmap.PAGESIZE, mmap.PAGESIZE):
                self._map(libc, first, last, page if page in within else None)

    def _map(self, libc: ctypes.CDLL, first: int, last: int, page: int | None) -> None:
        """Map a range, or all of the large page at ``page`` around it, whichever costs less."""
        with self._lock:
            if page in self._under_way:
                return
            large = page is not None and self._costs.large_pays() and not _any_mapped(libc, page, _LARGE_PAGE)
            if page is not None and large:
                self._under_way.add(page)
                first, last = page, page + _LARGE_PAGE
        seconds = _map_range(libc, first, last - first, large=large)
        with self._lock:
            self._costs.add(large=large, num_bytes=last - first, seconds=seconds)
            if large:
                self._under_way.discard(first)


def ask_for_large_pages(tensor: torch.Tensor) -> None:
    """Ask the system to map a host tensor, to which nothing has been written yet, 2 MiB at a time.

    NumPy does so with every large array. The request includes the pages at both ends, which other data may
    share: the system joins neighbouring ranges with the same advice, so a large page can span two tensors.
    """
    libc = _libc()
    if libc is None or not tensor.is_cpu or tensor.numel() * tensor.itemsize < _LARGE_PAGE:
        return
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(tensor.data_ptr() + tensor.numel() * tensor.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
    libc.madvise(start, end - start, _HUGEPAGE)


@functools.cache
def maps_ahead() -> bool:
    """Whether the system can map ranges in advance. Where it cannot, the kinds of pages are not timed."""
    libc = _libc()
    return libc is not None and libc.madvise(0, 0, _POPULATE_WRITE) == 0


def _map_range(libc: ctypes.CDLL, start: int, num_bytes: int, *, large: bool) -> float:
    """Map a range and return the seconds that the processor took for it.

    Waiting for a processor or for other threads is left out: on a busy machine it can be most of the time.
    """
    started = time.thread_time()
    if large:
        libc.madvise(start, num_bytes, _HUGEPAGE)
    libc.madvise(start, num_bytes, _POPULATE_WRITE)
    return time.thread_time() - started


def _any_mapped(libc: ctypes.CDLL, start: int, num_bytes: int) -> bool:
    """Whether a page of a range is in memory, or the system does not say."""
    resident = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    return libc.mincore(start, num_bytes, resident) != 0 or any(flag & 1 for flag in bytes(resident))


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """The C library with the two calls of this module; None on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc

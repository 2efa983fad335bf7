"""Mapping fresh host memory in advance, a range at a time and in large pages where the system allows it.

The first write to each page of fresh memory is a page fault. Linux (5.14 and later) can map and clear a whole
range in one call. Where the transparent_hugepage setting is not "never" it also maps 2 MiB at a time if it is
asked to. Mapping and writing 1 GB takes 0.38 s page by page, 0.33 s by range and 0.19 s in large pages. Both
calls are advice: where the system does not take it, the writes map the pages one by one, as they always do.
"""

import ctypes
import functools
import mmap
import sys

import torch

# Advice of <linux/mman.h>, which is part of Linux's stable interface.
_HUGEPAGE = 14
_POPULATE_WRITE = 23
_LARGE_PAGE = 2 << 20  # on x86, and on Arm with pages of 4 KiB


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


def prefault(tensor: torch.Tensor) -> None:
    """Map the pages that lie entirely within a contiguous host tensor, unless they are mapped already.

    Values that are there stay. On systems other than Linux nothing happens.
    """
    libc = _libc()
    if libc is None or not tensor.is_contiguous():
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    # Going over mapped pages again would cost more than it saves. The page in the middle stands for all.
    if start < end and not _is_mapped(libc, (start + end) // 2 // mmap.PAGESIZE * mmap.PAGESIZE):
        libc.madvise(start, end - start, _POPULATE_WRITE)


def _is_mapped(libc: ctypes.CDLL, page: int) -> bool:
    """Whether the page at an address is in memory, or the system does not say."""
    resident = ctypes.c_ubyte()
    return libc.mincore(page, mmap.PAGESIZE, ctypes.byref(resident)) != 0 or bool(resident.value & 1)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """The C library with the two calls of this module; None on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc

"""Fresh memory of the host, mapped a piece at a time before it is written, in large pages if it can be.

The first write to each page of fresh memory is a page fault. Linux (5.14 and later) maps and clears a whole
range in one call, and where the system's transparent_hugepage setting is not "never" it maps 2 MiB at a time
asked: mapping and writing 1 GB takes 0.38 s page by page, 0.33 by range, 0.19 in large pages. Both
are advice: where it cannot be taken, the pages are mapped by the writes, as ever.
"""

import ctypes
import functools
import mmap
import sys

import torch

# Of <linux/mman.h>, a part of Linux's stable interface.
_HUGEPAGE = 14
_POPULATE_WRITE = 23
_LARGE_PAGE = 2 << 20  # of x86, and of Arm with pages of 4 KiB


def ask_for_large_pages(tensor: torch.Tensor) -> None:
    """Let the system map host memory that nothing was written to yet 2 MiB at a time.

    Numpy does so with every large array. The pages at either end are included, whoever else is in them: the
    system joins neighbours that were asked for alike, and a large page may then span two tensors.
    """
    libc = _libc()
    if libc is None or not tensor.is_cpu or tensor.numel() * tensor.itemsize < _LARGE_PAGE:
        return
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(tensor.data_ptr() + tensor.numel() * tensor.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
    libc.madvise(start, end - start, _HUGEPAGE)


def prefault(tensor: torch.Tensor) -> None:
    """Map the whole pages under a contiguous host tensor, unless they are mapped already.

    Values that are there stay; on other systems than Linux nothing happens.
    """
    libc = _libc()
    if libc is None or not tensor.is_contiguous():
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    # Going over mapped pages again would cost more than it saves, and one page tells which kind these are.
    if start < end and not _is_mapped(libc, (start + end) // 2 // mmap.PAGESIZE * mmap.PAGESIZE):
        libc.madvise(start, end - start, _POPULATE_WRITE)


def _is_mapped(libc: ctypes.CDLL, page: int) -> bool:
    resident = ctypes.c_ubyte()
    return libc.mincore(page, mmap.PAGESIZE, ctypes.byref(resident)) != 0 or bool(resident.value & 1)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc

"""Fresh memory is mapped ahead of the writes, and nothing else changes."""

import ctypes
import mmap
import sys

import pytest
import torch

from fsdp_sft.weights.prefault import prefault

PAGE = mmap.PAGESIZE


def mapped_pages(address: int, num_bytes: int) -> int:
    """How many pages of a range are in memory, by the system's own count."""
    pages = num_bytes // PAGE
    resident = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(pages * PAGE), resident) == 0
    return sum(flag & 1 for flag in resident)


@pytest.mark.skipif(sys.platform != "linux", reason="MADV_POPULATE_WRITE is Linux's")
def test_only_whole_pages_inside_the_tensor_are_mapped() -> None:
    memory = mmap.mmap(-1, 64 * PAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    address = whole.data_ptr()
    assert mapped_pages(address, 64 * PAGE) == 0
    prefault(whole[10 * PAGE + 7 : 20 * PAGE + 9])
    kernel_knows_it = mapped_pages(address, 64 * PAGE)
    if kernel_knows_it == 0:
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert kernel_knows_it == 9
    assert mapped_pages(address + 11 * PAGE, 9 * PAGE) == 9


def test_values_stay_and_odd_tensors_are_left_alone() -> None:
    values = torch.arange(1 << 18, dtype=torch.float32)
    expected = values.clone()
    for view in (values, values[1:-1], values.view(512, 512).t(), values[:0], values[:3], torch.tensor(1.0)):
        prefault(view)
    assert torch.equal(values, expected)

"""Fresh memory is mapped ahead of the writes, and nothing else changes."""

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch

from fsdp_sft.weights.finish import materialise
from fsdp_sft.weights.prefault import ask_for_large_pages, prefault

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


def _asked_for(address: int) -> bool:
    """Whether the system was asked for large pages at an address, by its own list."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            within = start <= address < end
        elif within and first == "VmFlags:":
            return "hg" in rest.split()
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="MADV_HUGEPAGE is Linux's")
def test_large_pages_are_asked_for_where_they_fit() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("this kernel was built without large pages")
    # Mappings of their own, since what malloc hands out may have been asked for before.
    memory = [mmap.mmap(-1, 9 << 20) for _ in range(2)]
    large, small = (torch.frombuffer(each, dtype=torch.float32) for each in memory)
    ask_for_large_pages(large[5:-5])
    ask_for_large_pages(small[: 1 << 18])
    ask_for_large_pages(torch.empty(0))
    assert _asked_for(large.data_ptr())
    assert _asked_for(large.data_ptr() + (9 << 20) - PAGE)
    assert not _asked_for(small.data_ptr())
    large.fill_(3)
    assert torch.equal(large, torch.full_like(large, 3))


@pytest.mark.skipif(sys.platform != "linux", reason="MADV_HUGEPAGE is Linux's")
def test_shards_lie_in_large_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("this kernel was built without large pages")
    with torch.device("meta"):
        model = torch.nn.Linear(1 << 12, 1 << 12)
    materialise(model)
    assert _asked_for(model.weight.data_ptr() + (8 << 20))

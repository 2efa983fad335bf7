"""Fresh memory is mapped ahead of the writes, in pages that cost less, and nothing else changes."""

import ctypes
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp_sft._tensors import prefault as prefault
from fsdp_sft._tensors.prefault import HostPages, PageCosts, ask_for_large_pages
from fsdp_sft.weights import finish
from fsdp_sft.weights.finish import materialise

PAGE = mmap.PAGESIZE
MIB = 1 << 20


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
    HostPages().prefault(whole[10 * PAGE + 7 : 20 * PAGE + 9])
    kernel_knows_it = mapped_pages(address, 64 * PAGE)
    if kernel_knows_it == 0:
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert kernel_knows_it == 9
    assert mapped_pages(address + 11 * PAGE, 9 * PAGE) == 9


def test_values_stay_and_odd_tensors_are_left_alone() -> None:
    values = torch.arange(1 << 18, dtype=torch.float32)
    expected = values.clone()
    for view in (values, values[1:-1], values.view(512, 512).t(), values[:0], values[:3], torch.tensor(1.0)):
        HostPages().prefault(view)
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


Price = Callable[[float], float]  # seconds for a MiB, by the MiB that have been mapped


def pay(small: Price, large: Price, mib: int) -> tuple[float, float, float]:
    """Map so many MiB at these prices: (seconds, seconds of small pages alone, share in large pages)."""
    costs, at, paid, alone, in_large = PageCosts(), 0.0, 0.0, 0.0, 0.0
    while at < mib:
        takes_large = costs.large_pays()
        size = 2.0 if takes_large else 0.5
        seconds = size * (large if takes_large else small)(at)
        costs.add(large=takes_large, num_bytes=int(size * MIB), seconds=seconds)
        paid, alone, at = paid + seconds, alone + size * small(at), at + size
        in_large += size * takes_large
    return paid, alone, in_large / at


@pytest.mark.parametrize(
    ("small", "large", "shares"),
    [
        pytest.param(lambda at: 0.4, lambda at: 0.12, (0.9, 0.98), id="cheap"),
        pytest.param(lambda at: 0.4, lambda at: 2.4, (0.0, 0.02), id="dear"),
        pytest.param(lambda at: 0.4, lambda at: 0.4, (0.0, 0.3), id="as dear"),
        pytest.param(lambda at: 0.4, lambda at: 0.12 if at < 500 else 2.4, (0.2, 0.25), id="turns dear"),
        pytest.param(lambda at: 0.4, lambda at: 2.4 if at < 500 else 0.12, (0.4, 0.8), id="turns cheap"),
        pytest.param(lambda at: 0.4, lambda at: 0.12 if at // 100 % 2 else 2.4, (0.0, 0.6), id="alternates"),
        pytest.param(lambda at: 0.4 if at < 500 else 3.0, lambda at: 2.4, (0.2, 0.8), id="small turns dear"),
        pytest.param(lambda at: 3.0 if at < 500 else 0.4, lambda at: 2.0, (0.1, 0.5), id="small turns cheap"),
        pytest.param(lambda at: 0.4, lambda at: 12.0 if at % 40 < 2 else 0.12, (0.0, 0.5), id="stalls"),
        pytest.param(lambda at: 0.0, lambda at: 0.0, (0.0, 1.0), id="free"),
    ],
)
def test_the_cheaper_kind_is_taken_and_losses_are_bounded(
    small: Price, large: Price, shares: tuple[float, float]
) -> None:
    paid, alone, share = pay(small, large, 2000)
    dearest = 2 * max(large(at) for at in range(2000))
    assert paid <= 1.05 * alone + dearest
    assert shares[0] <= share <= shares[1]


def test_small_models_do_not_pay_for_a_try() -> None:
    assert pay(lambda at: 0.4, lambda at: 100.0, 32)[2] == 0


needs_choice = pytest.mark.skipif(
    not prefault.maps_ahead() or not Path("/sys/kernel/mm/transparent_hugepage").is_dir(),
    reason="this system has no MADV_POPULATE_WRITE, or no large pages",
)


@needs_choice
@pytest.mark.parametrize("slow", ["large", "small"])
def test_a_kind_that_the_system_makes_slow_is_left(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {True: 0, False: 0}
    real = prefault._map_range

    def slowed(libc: ctypes.CDLL, start: int, num_bytes: int, *, large: bool) -> float:
        taken[large] += num_bytes
        real(libc, start, num_bytes, large=large)
        return num_bytes * (1e-9 if large == (slow == "large") else 1e-10)

    monkeypatch.setattr(prefault, "_map_range", slowed)
    memory = mmap.mmap(-1, 160 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.float32)
    pages = HostPages()
    for number, part in enumerate(whole.split(MIB // 8)):
        pages.prefault(part)
        part.fill_(number)
    in_large = taken[True] / sum(taken.values())
    assert in_large < 0.05 if slow == "large" else in_large > 0.6
    assert _asked_for(whole.data_ptr() + 150 * MIB) == (slow == "small")
    assert mapped_pages(whole.data_ptr(), 160 * MIB) == 160 * MIB // PAGE
    expected = torch.arange(320, dtype=torch.float32).repeat_interleave(MIB // 8)
    assert torch.equal(whole, expected)


@needs_choice
def test_a_large_page_stays_within_the_storage_and_off_mapped_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageCosts, "large_pays", lambda _: True)
    memory = mmap.mmap(-1, 12 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    skipped = -address % (2 * MIB)  # to the first large page
    within = torch.frombuffer(memory, dtype=torch.uint8, offset=skipped + PAGE, count=6 * MIB)
    start = address + skipped
    within[3 * MIB - PAGE] = 7  # in the second large page
    for part in within.split(MIB // 2):
        HostPages().prefault(part)
    assert [_asked_for(start + at * MIB) for at in (1, 3, 5)] == [False, False, True]
    assert mapped_pages(start, PAGE) == 0
    assert mapped_pages(start + 6 * MIB + PAGE, 2 * MIB) == 0
    assert within.sum() == 7


@pytest.mark.skipif(sys.platform != "linux", reason="MADV_HUGEPAGE is Linux's")
@pytest.mark.parametrize("maps_ahead", [True, False])
def test_shards_ask_at_once_where_nothing_can_be_timed(
    maps_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(finish, "maps_ahead", lambda: maps_ahead)
    monkeypatch.setattr(finish, "ask_for_large_pages", asked.append)
    with torch.device("meta"):
        model = torch.nn.Linear(1 << 12, 1 << 12)
    materialise(model)
    assert len(asked) == (0 if maps_ahead else 2)

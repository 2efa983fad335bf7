"""Disks that are full, fail or cannot be written, and a rank that stands still."""

import errno
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft import dcp_io
from tests.faults.damage import Live
from tests.faults.kills import fill
from tests.harness.ranks import run_distributed

DISK_BYTES = 400_000  # two checkpoints and a half
STOPPED_SECONDS = 4
Result = tuple[str, str, str, bool]  # fault, mode, what the ranks raised, whether all is well


def disks(root: Path) -> list[Result]:
    """The same typed error on both ranks, the step before sound, nothing temporary after the next save."""
    results: list[Result] = []
    with small_disk() as disk:
        if disk is None:
            results.append(("full disk, read-only disk", "-", "not run: no right to mount", True))
        else:
            results += run_distributed(_full_disk, 2, str(disk), timeout=300)[0]
            (disk / "filler").unlink(missing_ok=True)
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            results += run_distributed(_read_only, 2, str(disk / "root"), timeout=300)[0]
    for async_ in (False, True):
        results += stopped(root / f"stopped-{async_}", async_=async_)
    return results


@contextmanager
def small_disk() -> Iterator[Path | None]:
    """A file system of ``DISK_BYTES``, or None without the right to mount one."""
    with tempfile.TemporaryDirectory(prefix="disk-") as name:
        options = f"size={DISK_BYTES},mode=755"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", name]
        mounted = False
        with suppress(OSError):
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        try:
            yield Path(name) if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", name], check=True)


def _raised(action: Callable[[], Any]) -> str:
    """Type (and number) of the error, agreed: what each rank raised if they differ."""
    try:
        action()
        told = "nothing"
    except OSError as error:
        told = f"{type(error).__name__} {errno.errorcode.get(error.errno or 0, error.errno)}"
    except Exception as error:
        told = type(error).__name__
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, told)
    return found[0] if len(set(found)) == 1 else str(found)


def _save(root: str, step: int, live: Live, *, async_: bool = False) -> None:
    fs.save_checkpoint(root, step, model=live.model, optimizer=live.optimizer, async_=async_).wait()


def _is_fine(root: str, step: int) -> bool:
    """The step is sound, and there is nothing else but steps, and the file that says who saves here."""
    names = [name for name in os.listdir(root) if not name.startswith(("step-", ".in-use"))]
    fine = dcp_io.verify_checkpoint(f"{root}/step-{step}") == [] and not names
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, fine)
    return all(found)


def _full_disk(disk: str) -> list[Result]:
    live, root = Live(), f"{disk}/root"
    _save(root, 1, live)
    results = []
    for step, async_ in ((2, False), (3, True)):
        _fill_disk(Path(disk, "filler"), leave=20_000)
        raised = _raised(lambda step=step, async_=async_: _save(root, 10 * step, live, async_=async_))
        fine = raised == "OSError ENOSPC" and _is_fine(root, step - 1)
        if dist.get_rank() == 0:
            Path(disk, "filler").unlink()
        dist.barrier()
        _save(root, step, live)
        mode = "async" if async_ else "sync"
        results.append(("full disk (ENOSPC)", mode, raised, fine and _is_fine(root, step)))
    return results


def _fill_disk(filler: Path, *, leave: int) -> None:
    if dist.get_rank() == 0:
        free = os.statvfs(filler.parent)
        filler.write_bytes(b"\0" * max(0, free.f_bavail * free.f_frsize - leave))
    dist.barrier()


def _read_only(root: str) -> list[Result]:
    live, results = Live(), []
    for async_ in (False, True):
        raised = _raised(lambda async_=async_: _save(root, 20, live, async_=async_))
        results.append(("read-only disk", "async" if async_ else "sync", raised, "EROFS" in raised))
    fs.load_checkpoint(root, model=live.model, optimizer=live.optimizer)
    return [(fault, mode, raised, fine and _is_fine(root, 3)) for fault, mode, raised, fine in results]


def stopped(root: Path, *, async_: bool) -> list[Result]:
    """SIGSTOP of rank 1 while rank 0 saves; both must end with a typed error, rank 1 when it goes on."""
    raised, seconds = run_distributed(_stopped, 2, str(root), async_, timeout=120)[0]
    again = run_distributed(_go_on, 2, str(root))[0]
    fine = raised == ["LostRankError"] * 2 and seconds < STOPPED_SECONDS + 6 and again
    told = f"{raised[0]} after {seconds:.1f} s with a time-out of {STOPPED_SECONDS} s"
    return [("a rank stands still (SIGSTOP)", "async" if async_ else "sync", told, fine)]


def _stopped(root: str, async_: bool) -> tuple[list[str], float]:
    fs.init_distributed(timeout=timedelta(seconds=STOPPED_SECONDS))
    live = Live()
    fill(live.model, live.optimizer, (1, 0))
    _save(root, 1, live, async_=async_)
    Path(root, f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    dist.barrier()
    started = time.perf_counter()
    told = "nothing"
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 wakes it when it has given up
    try:
        _save(root, 2, live, async_=async_)
    except Exception as error:
        told = type(error).__name__
    seconds = time.perf_counter() - started
    if dist.get_rank() == 0:
        os.kill(int(Path(root, "pid-1").read_text()), signal.SIGCONT)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, told)  # the default group is not broken
    for rank in range(2):
        Path(root, f"pid-{rank}").unlink(missing_ok=True)
    return found, seconds


def _go_on(root: str) -> bool:
    """The job starts again: what is loaded, and what the next save leaves."""
    live = Live()
    step = fs.load_checkpoint(root, model=live.model, optimizer=live.optimizer).step
    _save(root, 3, live)
    return step in (1, 2) and _is_fine(root, 3) and not torch.isnan(live.model.layers[0].weight.sum())

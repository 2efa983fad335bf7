"""kill -9 while ranks save in a loop, at random and at named moments, and what can be loaded afterwards.

Every saved number is a function of its name and of the step, so the parent knows without asking the library
what a step must load as. Ranks note in a file of their own what they begin and what has been acknowledged.
"""

import itertools
import os
import random
import shutil
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_sft as fs
from tests.harness import forks
from tests.harness.device import mesh_here
from tests.harness.models import tiny_model

WORLD_SIZE = 2
SPAN_SECONDS = 0.8  # kills strike uniformly within it, counted from the first save
SURVIVOR_SECONDS = 15
FINE = ("exact", "newer", "none due")
OUT = "out[1]"  # characters that a glob pattern would take for something else


class Net(nn.Module):
    """A few layers and an integer buffer."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@dataclass(frozen=True)
class Trial:
    """How ranks save, and who is killed when.

    Attributes:
        everyone: Whether all ranks are killed, or only ``victim``.
        async_: As in ``save_checkpoint``.
        keep_last: As in ``save_checkpoint``.
        victim: The rank that is killed (first).
        seconds: After the first save began; None waits for ``point``.
        point: A named moment of saving step 3, see ``POINTS``.
    """

    everyone: bool
    async_: bool
    keep_last: int
    victim: int
    seconds: float | None = None
    point: str | None = None


def random_trials(count: int) -> Iterator[Trial]:
    """Every combination in turn, each with a moment and a victim of its own."""
    draw = random.Random(3)
    kinds = itertools.cycle(itertools.product((False, True), (False, True), (1, 2)))
    for everyone, async_, keep_last in itertools.islice(kinds, count):
        yield Trial(everyone, async_, keep_last, draw.randrange(WORLD_SIZE), draw.uniform(0, SPAN_SECONDS))


def make(mesh: Any = None, width: int = 256) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and an AdamW that has stepped."""
    model = Net(width)
    if mesh is not None:
        fs.shard_model(
            model, mesh=mesh, blocks={f"layers.{i}": layer for i, layer in enumerate(model.layers)}
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that is saved, by name."""
    yield from model.named_buffers()
    for name, parameter in model.named_parameters():
        yield name, parameter
        for key, value in sorted(optimizer.state[parameter].items()):
            yield f"{name}/{key}", value


def expected(name: str, tensor: torch.Tensor, step: int) -> torch.Tensor:
    """The full tensor that ``name`` is at ``step``."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    if not tensor.is_floating_point():
        return torch.randint(1 << 40, tensor.shape, generator=draw)
    return torch.rand(tensor.shape, generator=draw, dtype=tensor.dtype)


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Give every tensor its values at ``step``; a rank of several takes its rows."""
    for name, tensor in tensors(model, optimizer):
        full = expected(name, tensor, step)
        if hasattr(tensor, "to_local"):
            tensor.to_local().copy_(full.chunk(dist.get_world_size())[dist.get_rank()])
        else:
            tensor.copy_(full)


def differing(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    """Names of what is not as it must be at ``step``, in an ordinary model."""
    return [name for name, t in tensors(model, optimizer) if not torch.equal(t, expected(name, t, step))]


def run_trial(trial: Trial, folder: Path) -> tuple[str, int | None, bool]:
    """Start the ranks, strike, and load what is there in this process.

    Returns:
        What came of it, one of ``FINE`` or what went wrong; the step that was loaded; and whether the victim
        was saving when it was killed.
    """
    ranks = _start(_save_forever, folder, trial)
    _wait(lambda: len(list(folder.glob("log-*"))) == WORLD_SIZE or not all(p.is_alive() for p in ranks), 60)
    if trial.seconds is not None:
        time.sleep(trial.seconds)
        for rank in [trial.victim, *(r for r in range(WORLD_SIZE) if r != trial.victim and trial.everyone)]:
            os.kill(ranks[rank].pid, signal.SIGKILL)
    hung = _end(ranks, SURVIVOR_SECONDS)
    logs = [(folder / f"log-{rank}").read_text().splitlines() for rank in range(WORLD_SIZE)]
    inside = bool(logs[trial.victim]) and logs[trial.victim][-1].startswith("begin")
    others = {line for log in logs for line in log if line.startswith("error")} - {"error LostRankError"}
    if hung or others:
        return f"WRONG: hung {hung}, {others}", None, inside
    begun, acknowledged = (
        {int(line.split()[1]) for log in logs for line in log if line.startswith(word)}
        for word in ("begin", "ack")
    )
    return *judge(folder / "root", begun, acknowledged), inside


def _start(work: Callable[..., None], folder: Path, how: Any) -> list[Any]:
    """The ranks, each a process of its own, in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ranks = [forks.process(work, folder, rank, how) for rank in range(WORLD_SIZE)]
    for process in ranks:
        process.start()
    return ranks


def _end(ranks: list[Any], seconds: float) -> bool:
    """Wait for the ranks, and end those that have not: whether there were any."""
    _wait(lambda: not any(process.is_alive() for process in ranks), seconds)
    hung = any(process.is_alive() for process in ranks)
    for process in ranks:
        process.kill()
        process.join()
    return hung


def run_export_trial(folder: Path, everyone: bool) -> str:
    """Kill ranks that export, and export there again: "exact", or what is wrong."""
    from transformers import AutoModelForCausalLM

    hung = _end(_start(_export, folder, everyone), 60)
    left = sorted(path.name for path in folder.iterdir())
    if hung or OUT in left or not any(name.startswith(".tmp-out") for name in left):
        return f"WRONG: hung {hung}, there is {left}"
    model = tiny_model("llama", seed=3)
    fs.export_hf(model, folder / OUT, dtype=None)
    again = AutoModelForCausalLM.from_pretrained(folder / OUT).state_dict()
    same = all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    return "exact" if same and not list(folder.glob(".tmp-*")) else "WRONG: the second export"


def _export(folder: Path, rank: int, everyone: bool) -> None:
    _join(folder, rank)
    model = fs.shard_model(tiny_model("llama", seed=3), mesh=mesh_here())
    arm = _strike("fsdp_sft.export.hf", "write_early", lambda fd, at, view: len(view) > 2500, _half_write)
    arm(Trial(everyone, async_=False, keep_last=2, victim=0), folder)
    try:
        fs.export_hf(model, folder / OUT, dtype=None)
    except Exception:
        os._exit(1)


def judge(root: Path, begun: set[int], acknowledged: set[int]) -> tuple[str, int | None]:
    """Whether what loads is what was acknowledged last, or newer and complete; then save once more."""
    due = max(acknowledged, default=None)
    model, optimizer = make()
    try:
        step = fs.load_checkpoint(root, model=model, optimizer=optimizer).step
    except (fs.CheckpointNotFoundError, fs.CheckpointCorruptError) as error:
        return ("none due" if due is None else f"LOST {due}: {error}"), None
    if step not in begun or differing(model, optimizer, step):
        return f"WRONG {step}: {differing(model, optimizer, step)[:3]}", step
    if due is not None and step < due:
        return f"LOST {due}, loaded {step}", step
    fs.save_checkpoint(root, 9999, model=model, optimizer=optimizer)
    if list(root.glob(".tmp-*")):
        return "WRONG: temporary folders stay", step
    return ("exact" if step in acknowledged else "newer"), step


def _wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.002)


def _join(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    options = {"init_method": f"file://{folder / 'store'}", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE, **options)


def _save_forever(folder: Path, rank: int, trial: Trial) -> None:
    _join(folder, rank)
    model, optimizer = make(mesh_here())
    root = folder / "root"
    # Groups are made and memory is warm before the clock starts.
    fs.save_checkpoint(folder / "warm", 0, model=model, optimizer=optimizer, async_=trial.async_).wait()
    dist.barrier()
    log = (folder / f"log-{rank}").open("w", buffering=1)
    try:
        for step in itertools.count(1):
            if trial.point is not None and step == 3:
                POINTS[trial.point][1](trial, folder)
            fill(model, optimizer, step)
            log.write(f"begin {step}\n")
            saved = fs.save_checkpoint(
                root, step, model=model, optimizer=optimizer, async_=trial.async_, keep_last=trial.keep_last
            )
            if trial.async_:
                fill(model, optimizer, -step)  # training goes on; the copy must not see it
            saved.wait()
            log.write(f"ack {step}\n")
    except Exception as error:
        log.write(f"error {type(error).__name__}\n")
        os._exit(0)


def _die(trial: Trial, folder: Path) -> None:
    for rank in [r for r in range(WORLD_SIZE) if trial.everyone and r != dist.get_rank()]:
        os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _strike(
    module: str,
    name: str,
    when: Callable[..., bool] | None,
    part: Callable[..., Any] | None,
    after: bool = False,
) -> Callable[[Trial, Path], None]:
    """Make ``module.name`` kill, always or ``when``: before it begins, after ``part`` of it, or after it."""

    def arm(trial: Trial, folder: Path) -> None:
        import importlib

        owner = importlib.import_module(module)
        original = getattr(owner, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() != trial.victim or (when is not None and not when(*args)):
                return original(*args, **kwargs)
            if part is not None:
                part(original, *args)
            if after:
                original(*args, **kwargs)
            return _die(trial, folder)

        setattr(owner, name, struck)

    return arm


def _half_write(write_at: Callable[..., None], fd: int, offset: int, view: memoryview) -> None:
    write_at(fd, offset, view.cast("B")[: len(view) // 2])


def _half_file(write_bytes: Callable[..., Any], path: Path, data: bytes) -> None:
    write_bytes(path, data[: len(data) // 2])


def _half_deleted(rmtree: Callable[..., Any], path: Path, *_: Any) -> None:
    next(Path(path).glob("*/*")).unlink()


def _to_step(source: Any, target: Any) -> bool:
    return Path(target).name == "step-3"


def _pruned(path: Any, *_: Any) -> bool:
    return Path(path).name.startswith(".tmp-pruned")


_FOLDER, _FILES = "fsdp_sft.dcp_io.folder", "fsdp_sft._tensors.disk"
POINTS: dict[str, tuple[int, Callable[[Trial, Path], None]]] = {
    "before data": (1, _strike(_FOLDER, "write_tensors", None, None)),
    "mid-data": (1, _strike(_FILES, "write_at", lambda fd, at, view: len(view) > 10_000, _half_write)),
    "after data": (1, _strike(_FOLDER, "write_tensors", None, None, after=True)),
    "mid-manifest": (
        0,
        _strike(_FOLDER, "write_bytes", lambda path, _: path.name == "MANIFEST.json", _half_file),
    ),
    "before rename": (0, _strike("os", "rename", _to_step, None)),
    "after rename": (0, _strike("os", "rename", _to_step, None, after=True)),
    "mid-prune": (0, _strike("shutil", "rmtree", _pruned, _half_deleted)),
}

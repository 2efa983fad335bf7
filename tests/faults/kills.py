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
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
Key = tuple[int, int]  # step, and how many times it has been saved again


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
        again: Every other step is damaged after it was saved, and saved again.
        victim: The rank that is killed (first).
        seconds: After the first save began; None waits for ``point``.
        point: A named moment of saving step 3, see ``POINTS``.
    """

    everyone: bool
    async_: bool
    keep_last: int
    again: bool
    victim: int
    seconds: float | None = None
    point: str | None = None


@dataclass
class Outcome:
    """What came of a trial; ``verdict`` is "exact", "newer", "none due" or what went wrong."""

    verdict: str
    inside: bool
    survivor: str = "-"
    loaded: Key | None = None


@dataclass
class _Log:
    begun: set[Key] = field(default_factory=set)
    acked: set[Key] = field(default_factory=set)
    damaged: set[Key] = field(default_factory=set)
    last: list[str] = field(default_factory=list)


def random_trials(count: int, seed: int = 0) -> Iterator[Trial]:
    """Every combination in turn, each with a moment and a victim of its own."""
    draw = random.Random(seed)
    kinds = itertools.cycle(itertools.product((False, True), (False, True), (1, 2), (False, True)))
    for everyone, async_, keep_last, again in itertools.islice(kinds, count):
        seconds = draw.uniform(0, SPAN_SECONDS)
        yield Trial(everyone, async_, keep_last, again, draw.randrange(WORLD_SIZE), seconds)


def point_trials() -> Iterator[Trial]:
    """Each named point, with one rank and with all ranks killed, synchronous and not."""
    for (name, (victim, _)), everyone, async_ in itertools.product(
        POINTS.items(), (False, True), (False, True)
    ):
        yield Trial(everyone, async_, 2, name == "moved aside", victim, point=name)


def make(mesh: Any = None, width: int = 256) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and an AdamW that has stepped."""
    model = Net(width)
    if mesh is not None:
        blocks = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
        fs.shard_model(model, mesh=mesh, blocks=blocks)
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


def expected(name: str, tensor: torch.Tensor, key: Key) -> torch.Tensor:
    """The full tensor that ``name`` is at ``key``."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {key}".encode()))
    if not tensor.is_floating_point():
        return torch.randint(1 << 40, tensor.shape, generator=draw)
    return torch.rand(tensor.shape, generator=draw, dtype=tensor.dtype)


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, key: Key) -> None:
    """Give every tensor its values at ``key``; a rank of several takes its rows."""
    for name, tensor in tensors(model, optimizer):
        full = expected(name, tensor, key)
        if hasattr(tensor, "to_local"):
            parts = full.chunk(dist.get_world_size())
            tensor.to_local().copy_(parts[dist.get_rank()])
        else:
            tensor.copy_(full)


def differing(model: nn.Module, optimizer: torch.optim.Optimizer, key: Key) -> list[str]:
    """Names of what is not as it must be at ``key``, in an ordinary model."""
    return [name for name, t in tensors(model, optimizer) if not torch.equal(t, expected(name, t, key))]


def is_bad(outcome: Outcome) -> bool:
    """Whether something was lost, a rank hung, or a survivor ended with another error than it should."""
    lost = outcome.verdict not in ("exact", "newer", "none due")
    return lost or outcome.survivor not in ("-", "LostRankError", "Barrier")


def run_trial(trial: Trial, folder: Path) -> Outcome:
    """Start the ranks, strike, and load what is there in this process."""
    ranks = _start(_save_forever, folder, trial)
    _wait(lambda: len(list(folder.glob("log-*"))) == WORLD_SIZE or not all(p.is_alive() for p in ranks), 60)
    if trial.seconds is not None:
        time.sleep(trial.seconds)
        order = [trial.victim, *(r for r in range(WORLD_SIZE) if r != trial.victim and trial.everyone)]
        for rank in order:
            os.kill(ranks[rank].pid, signal.SIGKILL)
    hung = _end(ranks, SURVIVOR_SECONDS)
    log = _read_logs(folder)
    last = log.last[trial.victim]
    inside = last.startswith("begin")
    survivors = {line.split()[1] for line in log.last if line.startswith("error")}
    verdict, loaded = judge(folder / "root", log, trial.keep_last)
    survivor = "hung" if hung else ", ".join(sorted(survivors)) or "-"
    return Outcome(verdict, inside, survivor, loaded)


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
    if hung or (folder / "out").exists() or not list(folder.glob(".tmp-out-*")):
        return f"WRONG: hung {hung}, there is {sorted(path.name for path in folder.iterdir())}"
    model = tiny_model("llama", seed=3)
    fs.export_hf(model, folder / "out", dtype=None)
    again = AutoModelForCausalLM.from_pretrained(folder / "out").state_dict()
    same = all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    return "exact" if same and not list(folder.glob(".tmp-*")) else "WRONG: the second export"


def _export(folder: Path, rank: int, everyone: bool) -> None:
    _join(folder, rank)
    model = tiny_model("llama", seed=3)
    fs.shard_model(model, mesh=mesh_here())
    trial = Trial(everyone, async_=False, keep_last=2, again=False, victim=0)
    _strike("fsdp_sft.export.hf", "write_early", lambda fd, at, view: len(view) > 2500, _half_write)(
        trial, folder
    )
    try:
        fs.export_hf(model, folder / "out", dtype=None)
    except Exception:
        os._exit(1)


def judge(root: Path, log: _Log, keep_last: int) -> tuple[str, Key | None]:
    """Whether what loads is what was acknowledged last, or newer and complete; then save once more."""
    steps = sorted({step for step, _ in log.acked})[-keep_last:]
    due = {max(key for key in log.acked if key[0] == step) for step in steps} - log.damaged
    model, optimizer = make()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = fs.load_checkpoint(root, model=model, optimizer=optimizer)
    except (fs.CheckpointNotFoundError, fs.CheckpointCorruptError) as error:
        return ("none due" if not due else f"LOST {max(due)}: {error}"), None
    key: Key = tuple(loaded.train_state["key"])
    wrong = differing(model, optimizer, key)
    if wrong or key not in log.begun or loaded.step != key[0]:
        return f"WRONG {key}: {wrong[:3]}", key
    if due and key < max(due):
        return f"LOST {max(due)}, loaded {key}", key
    fill(model, optimizer, (9999, 0))
    fs.save_checkpoint(root, 9999, model=model, optimizer=optimizer)
    if list(root.glob(".tmp-*")):
        return "WRONG: temporary folders stay", key
    return ("exact" if key in log.acked else "newer"), key


def _wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.002)


def _read_logs(folder: Path) -> _Log:
    log = _Log()
    for rank in range(WORLD_SIZE):
        path = folder / f"log-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        log.last.append(lines[-1] if lines else "")
        for line in lines:
            word, *numbers = line.split()
            if word in ("begin", "ack", "damage"):
                kind = {"begin": log.begun, "ack": log.acked, "damage": log.damaged}[word]
                kind.add((int(numbers[0]), int(numbers[1])))
    return log


def _join(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    store = f"file://{folder / 'store'}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60)
    )


def _save_forever(folder: Path, rank: int, trial: Trial) -> None:
    _join(folder, rank)
    model, optimizer = make(mesh_here())
    root = folder / "root"
    warm = folder / "warm"  # groups are made and memory is warm before the clock starts
    fs.save_checkpoint(warm, 0, model=model, optimizer=optimizer, async_=trial.async_).wait()
    dist.barrier()
    log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        for key in _keys(trial):
            if key[1]:
                _damage(root, (key[0], 0), log)
            if trial.point is not None and key == (3, int(trial.point == "moved aside")):
                POINTS[trial.point][1](trial, folder)
            fill(model, optimizer, key)
            _note(log, "begin", key)
            saved = fs.save_checkpoint(
                root,
                key[0],
                model=model,
                optimizer=optimizer,
                train_state={"key": list(key)},
                async_=trial.async_,
                keep_last=trial.keep_last,
            )
            if trial.async_:
                fill(model, optimizer, (-key[0], 0))  # training goes on; the copy must not see it
            saved.wait()
            _note(log, "ack", key)
    except Exception as error:
        os.write(log, f"error {type(error).__name__}\n".encode())
        os._exit(0)


def _keys(trial: Trial) -> Iterator[Key]:
    for step in itertools.count(1):
        yield step, 0
        if trial.again and step % 2:
            yield step, 1


def _note(log: int, word: str, key: Key) -> None:
    os.write(log, f"{word} {key[0]} {key[1]}\n".encode())


def _damage(root: Path, key: Key, log: int) -> None:
    _note(log, "damage", key)
    _meet()
    if dist.get_rank() == 0:
        path = root / f"step-{key[0]}" / "shards" / "00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    _meet()


class Barrier(RuntimeError):
    """The loop's own collective broke, between two saves."""


def _meet() -> None:
    try:
        dist.barrier()
    except RuntimeError as error:
        raise Barrier from error


def _die(trial: Trial, folder: Path) -> None:
    if trial.everyone:
        for rank in range(WORLD_SIZE):
            if rank != dist.get_rank():
                os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _strike(
    module: str, name: str, when: Callable[..., bool], part: Callable[..., Any] | None, after: bool = False
) -> Callable[[Trial, Path], None]:
    """Make ``module.name`` kill: before it does anything, after ``part`` of it, or after it."""

    def arm(trial: Trial, folder: Path) -> None:
        import importlib

        owner = importlib.import_module(module)
        original = getattr(owner, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() != trial.victim or not when(*args):
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


def _from_step(source: Any, target: Any) -> bool:
    return Path(source).name == "step-3"


def _pruned(path: Any, *_: Any) -> bool:
    return Path(path).name.startswith(".tmp-pruned")


def _anything(*_: Any) -> bool:
    return True


_FOLDER, _FILES = "fsdp_sft.dcp_io.folder", "fsdp_sft._tensors.disk"
POINTS: dict[str, tuple[int, Callable[[Trial, Path], None]]] = {
    "before data": (1, _strike(_FOLDER, "write_tensors", _anything, None)),
    "mid-data": (1, _strike(_FILES, "write_at", lambda fd, at, view: len(view) > 10_000, _half_write)),
    "after data": (1, _strike(_FOLDER, "write_tensors", _anything, None, after=True)),
    "mid-manifest": (
        0,
        _strike(_FOLDER, "write_bytes", lambda path, _: path.name == "MANIFEST.json", _half_file),
    ),
    "before rename": (0, _strike("os", "rename", _to_step, None)),
    "moved aside": (0, _strike("os", "rename", _from_step, None, after=True)),
    "after rename": (0, _strike("os", "rename", _to_step, None, after=True)),
    "mid-prune": (0, _strike("shutil", "rmtree", _pruned, _half_deleted)),
}

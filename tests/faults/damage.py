"""Flipped bits and damaged files: what loads although it should not, and what touches the live model."""

import collections
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp_sft as fs
from tests.faults.kills import expected, fill, make, tensors
from tests.harness.device import mesh_here
from tests.harness.ranks import run_distributed

WIDTH = 16  # small, so that manifest, headers and JSON are a good part of all bytes
Damage = Callable[[Path], None]


def damage(root: Path) -> list[tuple[str, str, str]]:
    """Truncated, deleted, swapped and stale files: (kind of file, what was done to it, verdict)."""
    run_distributed(save, 2, str(root / "good"))
    run_distributed(save, 1, str(root / "one"))
    run_distributed(save, 3, str(root / "three"))
    return run_distributed(_damage_jobs, 2, str(root), timeout=1800)[0]  # type: ignore[no-any-return]


def kind_of(name: str) -> str:
    """``shards/00001.safetensors`` -> ``shards/*.safetensors``."""
    return re.sub(r"\d{5}", "*", name)


def save(root: str) -> None:
    """Steps 1 and 2, each with numbers and random generators of its own."""
    model, optimizer = make(mesh_here(), WIDTH)
    for step in (1, 2):
        seed = 1000 * dist.get_world_size() + 100 * step + dist.get_rank()
        torch.manual_seed(seed)
        random.seed(seed)
        fill(model, optimizer, (step, 0))
        state = {
            "key": [step, 0],
            "ranks": dist.get_world_size(),
            "scheduler": {"lr": [1e-05 / (i + step) for i in range(99)]},
        }
        fs.save_checkpoint(
            root,
            step,
            model=model,
            optimizer=optimizer,
            train_state=state,
            rank_state={"rows": torch.arange(step + 9)},
        )


class Live:
    """A model of other values than any checkpoint's, and whether a load has touched it."""

    def __init__(self) -> None:
        self.model, self.optimizer = make(mesh_here(), WIDTH)
        fill(self.model, self.optimizer, (77, 0))
        self.before = [self._local(t).clone() for _, t in tensors(self.model, self.optimizer)]
        self.random = (torch.get_rng_state(), random.getstate())

    @staticmethod
    def _local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()

    def is_untouched(self) -> bool:
        """On all ranks, bit for bit."""
        now = [self._local(t) for _, t in tensors(self.model, self.optimizer)]
        same = all(torch.equal(a, b) for a, b in zip(now, self.before, strict=True))
        same = (
            same
            and torch.equal(torch.get_rng_state(), self.random[0])
            and random.getstate() == self.random[1]
        )
        return _all(same)

    def load(self, path: Path, **options: Any) -> str:
        """``"refused"`` (on all ranks, with the right error), ``"loaded"``, or what else happened."""
        try:
            fs.load_checkpoint(path, model=self.model, optimizer=self.optimizer, **options)
            verdict = "loaded"
        except fs.CheckpointCorruptError:
            verdict = "refused"
        except Exception as error:
            verdict = f"{type(error).__name__}: {error}"
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, verdict)
        return found[0] if len(set(found)) == 1 else f"ranks differ: {found}"


def _all(value: bool) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(found)


def flip_jobs(root: str, count: int) -> tuple[int, int, collections.Counter]:
    """(loads that were not refused, loads that touched the model, flips by kind of file)"""
    step = Path(root, "step-2")
    files = sorted(path for path in step.rglob("*") if path.is_file())
    live, draw = Live(), random.Random(1)
    silent = touched = 0
    by_kind: collections.Counter = collections.Counter()
    weights = [path.stat().st_size for path in files]
    for _ in range(count):
        path = draw.choices(files, weights)[0]
        place = (draw.randrange(path.stat().st_size), 1 << draw.randrange(8))
        by_kind[kind_of(str(path.relative_to(step)))] += 1
        _flip(path, *place)
        verdict = live.load(step)
        silent += verdict != "refused"
        if verdict != "refused" and dist.get_rank() == 0:
            print(f"{path} {place}: {verdict}", flush=True)
        touched += not live.is_untouched()
        _flip(path, *place)
    return silent, touched, by_kind


def _flip(path: Path, position: int, bit: int) -> None:
    if dist.get_rank() == 0:
        with path.open("r+b") as file:
            file.seek(position)
            (byte,) = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ bit]))
    dist.barrier()


def damages(name: str, step: Path) -> Iterator[tuple[str, Damage]]:
    """What can be done to one file of a step."""
    size = (step / name).stat().st_size
    for keep in (0, size // 2, size - 1):
        yield "cut short", lambda s, keep=keep: (s / name).write_bytes((s / name).read_bytes()[:keep])
    yield "longer", lambda s: (s / name).write_bytes((s / name).read_bytes() + b"\0")
    yield "deleted", lambda s: (s / name).unlink()
    yield "a folder", lambda s: [(s / name).unlink(), (s / name).mkdir()]
    for other in sorted(str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()):
        if other > name:
            yield "swapped", lambda s, other=other: _swap(s / name, s / other)
    yield "of another step", lambda s: shutil.copy(s.parent / "step-1" / name, s / name)
    for size_name in ("one", "three"):
        stale = step.parent.parent / size_name / "step-2" / name
        if stale.exists():
            yield "of another world size", lambda s, stale=stale: shutil.copy(stale, s / name)


def _swap(a: Path, b: Path) -> None:
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)


def _damage_jobs(folder: str) -> list[tuple[str, str, str]]:
    root = Path(folder)
    good, work = root / "good", root / "work"
    live = Live()
    results = []
    names = sorted(str(p.relative_to(good / "step-2")) for p in (good / "step-2").rglob("*") if p.is_file())
    cases = [(name, what, change) for name in names for what, change in damages(name, good / "step-2")]
    cases.append(("more files", "of another world size", _add_files))
    for name, what, change in cases:
        if dist.get_rank() == 0:
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(good, work)
            change(work / "step-2")
        dist.barrier()
        verdict = live.load(work / "step-2")
        if not live.is_untouched() and verdict == "refused":
            verdict = "touched"
        verdict = _after(live, work, verdict, name)
        if verdict not in ("refused", "exact") and dist.get_rank() == 0:
            print(f"{name} {what}: {verdict}", flush=True)
        results.append((kind_of(name), what, verdict))
    return results


def _add_files(step: Path) -> None:
    """Files that three ranks would have, which the manifest does not name: they are not read."""
    name = "shards/00002.safetensors"
    shutil.copy(step.parent.parent / "three" / "step-2" / name, step / name)


def _after(live: Live, work: Path, verdict: str, name: str) -> str:
    """The step before loads from the root, or the same one if the damage was none; exactly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = live.load(work)
    key = (1, 0) if verdict == "refused" else (2, 0)
    local = _exact(live, key)
    fill(live.model, live.optimizer, (77, 0))
    torch.set_rng_state(live.random[0])
    random.setstate(live.random[1])
    if loaded != "loaded" or not _all(local):
        return f"{verdict}, then {loaded}, not step {key[0]}"
    return "exact" if verdict == "loaded" and name == "more files" else verdict


def _exact(live: Live, key: tuple[int, int]) -> bool:
    for name, tensor in tensors(live.model, live.optimizer):
        full = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if not torch.equal(full, expected(name, tensor, key)):
            return False
    return True

"""Checkpoints made to harm: nothing in them runs, nothing is written outside, memory stays bounded."""

import hashlib
import io
import json
import os
import pickle
import re
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fsdp_sft as fs
from fsdp_sft.dcp_io import saving
from tests.faults.kills import make, tensors

Attack = Callable[[Path], object]
_FIRST = "shards/00000.safetensors"


class Marker:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def run_attacks(folder: str, *, large: bool) -> list[tuple[str, str, int]]:
    """Name, verdict and bytes of memory of each attack; ``large`` are those that write more than 90 MB."""
    root = Path(folder)
    model, optimizer = make(width=16)
    fs.save_checkpoint(
        root / "good", 1, model=model, optimizer=optimizer, rank_state={"rows": torch.arange(3)}
    )
    saving._held.clear()
    results = []
    for name, attack in attacks(root / "good" / "step-1", root / "ran"):
        if " MB " in name and not large:
            continue
        work = root / "inner" / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(root / "good", work)
        attack(work / "step-1")
        results.append((name, *_attempt(root, work)))
    return results


def _attempt(root: Path, work: Path) -> tuple[str, int]:
    model, optimizer = make(width=16)
    before = [tensor.detach().clone() for _, tensor in tensors(model, optimizer)]
    around = _listing(root, work)
    reset_peak()
    base = peak()
    try:
        fs.load_checkpoint(work / "step-1", model=model, optimizer=optimizer)
        verdict = "LOADED"
    except fs.CheckpointCorruptError:
        verdict = "refused"
    except BaseException as error:
        verdict = f"{type(error).__name__}: {str(error)[:100]}"
    grown = peak() - base
    if not all(torch.equal(t, b) for (_, t), b in zip(tensors(model, optimizer), before, strict=True)):
        verdict += ", model touched"
    if _listing(root, work) != around:
        verdict += ", something was made or changed"
    return verdict, grown


def _listing(root: Path, work: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in root.rglob("*") if not p.is_relative_to(work)}


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attacks(good: Path, marker: Path) -> Iterator[tuple[str, Attack]]:
    """Name and what it does to a copy of a sound step."""
    payloads = {"pickle": pickle.dumps(Marker(marker)), "torch.save": _torch_saved(marker)}
    for name in sorted(str(p.relative_to(good)) for p in good.rglob("*") if p.is_file()):
        for kind, payload in payloads.items():
            yield f"{kind} as {name}", partial(_replace, name=name, content=payload)
    yield from FILES.items()
    for what, change in SIGNED.items():
        yield what, partial(sign, change=change)


def sign(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and give it the digest that it then must have."""
    raw = json.loads((step / "MANIFEST.json").read_text())
    raw.pop("digest")
    change(raw)
    text = json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()
    raw["digest"] = hashlib.sha256(text).hexdigest()
    (step / "MANIFEST.json").write_bytes(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())


def _replace(step: Path, name: str, content: bytes, size: int | None = None) -> None:
    """Other contents for a file, with size and checksum in the manifest put right."""
    path = step / name
    path.write_bytes(content)
    if size is not None:
        os.truncate(path, size)
    if name != "MANIFEST.json":
        with path.open("rb") as file:
            record = [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]
        sign(step, lambda r: r["files"].__setitem__(int(path.stem), record))


def _raw(step: Path, content: bytes) -> None:
    (step / "MANIFEST.json").write_bytes(content)


def _torch_saved(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Marker(marker), buffer)
    return buffer.getvalue()


def _link(step: Path) -> None:
    shutil.move(step / _FIRST, step.parent / "elsewhere")
    (step / _FIRST).symlink_to("../../elsewhere")


def _entry(shape: list[int], size: int) -> bytes:
    return json.dumps({"x": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}).encode()


def _long_shape(raw: dict[str, Any]) -> None:
    next(iter(raw["model"].values()))[1] = [2**62] * 1_000_000


def _sharding(raw: dict[str, Any], *mesh: int, world_size: int = 2**60, **more: Any) -> None:
    raw.update(world_size=world_size, shardings=[{"mesh": list(mesh), "splits": [[0, 0]], **more}])
    for row in (*raw["model"].values(), *raw["optimizer"].values()):
        row[2:] = [0]


def _with_state(step: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Another tensor of a rank's own state in its file; ``key`` is a regular expression."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save

    with safe_open(step / _FIRST, framework="pt") as file:
        metadata = file.metadata()
    held = load_file(step / _FIRST)
    name = next(name for name in held if re.fullmatch(key, name))
    _replace(step, _FIRST, save({**held, name: change(held[name])}, metadata))


def _deep_state(step: Path) -> None:
    text = bytearray(b"[" * 800 + b"]" * 800)
    _with_state(step, r"rank\.0", lambda _: torch.frombuffer(text, dtype=torch.uint8))


def _short_rng(step: Path) -> None:
    _with_state(step, r"rank\.0\..*torch.*", lambda state: state[:-1].clone())


def _bad_option(raw: dict[str, Any]) -> None:
    raw["optimizer_info"]["groups"][0]["options"]["lr"] = {"__fsdp_sft__": "eval", "items": []}


def _claims(length: int) -> Attack:
    """A header that says it has so many bytes."""
    return partial(_replace, name=_FIRST, content=struct.pack("<Q", length), size=2 * 10**8)


def _has(header: bytes) -> Attack:
    """A file with a header alone."""
    return partial(_replace, name=_FIRST, content=struct.pack("<Q", len(header)) + header)


# What is done to files of a step.
FILES: dict[str, Attack] = {
    "a link out of the folder": _link,
    "a header of 2^63 bytes": _claims(2**63 - 1),
    "a header of too many bytes": _claims(10**8 + 1),
    "a header of 100 MB of bytes": _claims(10**8),
    "a header of 95 MB of lists": lambda s: _has(b"[" + b"[]," * 31_000_000 + b"1]")(s),
    "a header 100,000 deep": _has(b"[" * 100_000),
    "a tensor of 2^62 bytes": _has(_entry([2**60, 4], 2**62)),
    "a manifest 100,000 deep": lambda s: _raw(s, b"[" * 100_000),
    "a manifest of 1 TB of nothing": lambda s: os.truncate(s / "MANIFEST.json", 1 << 40),
    "a manifest of 125 MB of lists": lambda s: _raw(s, b"[" + b"[]," * 41_600_000 + b"1]"),
    "a number of 10 million digits": lambda s: _raw(s, b"[" + b"9" * 10_000_000 + b"]"),
    "state 800 deep": _deep_state,
    "a generator's state of another length": _short_rng,
}
# What is changed in a manifest, which is signed again.
SIGNED: dict[str, Callable[[dict[str, Any]], object]] = {
    **{
        f"a part in {name!r}": lambda r, n=name: r.update(files={n: r["files"][0]})
        for name in ("/etc/passwd", "../x.safetensors", "ab")
    },
    "a file without a rank": lambda r: r["files"].append(r["files"][0]),
    "a shape of a million sizes": _long_shape,
    "a mesh of 2^60 ranks": lambda r: _sharding(r, 2**60),
    "a mesh of 2^60 ranks, three times over": lambda r: _sharding(r, 2**60, 1, 1),
    "a list of a million ranks": lambda r: _sharding(
        r, 10**6, world_size=10**6, ranks=list(range(10**6))[::-1]
    ),
    "a million files": lambda r: r.update(files=[[1, ""]] * 1_000_000),
    "a train_state 100,000 deep": lambda r: r.update(train_state="[" * 100_000),
    "settings that are none": lambda r: r.update(settings={"adapters": [[1]]}),
    "a metric past any float": lambda r: r.update(metric=10**400),
    "an option that cannot be decoded": _bad_option,
}

"""What readers cost at 1, 10 and 100 times the size of what a file claims or repeats."""

import json
import pickle
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsdp_sft as fs
from fsdp_sft._process.bounds import parse_json
from fsdp_sft._tensors.stored import file_header
from fsdp_sft._tensors.torch_file import load_pickled
from fsdp_sft.dcp_io.manifest import read_manifest
from fsdp_sft.weights.resolve import read_index
from tests.faults.hostile import sign
from tests.faults.kills import make
from tests.faults.tables import table
from tests.harness.ranks import run_distributed

SIZES = (1, 10, 100)
Growth = tuple[str, list[tuple[int, float, int, str]]]  # field, (bytes, seconds, bytes of memory, outcome)


def _header(folder: Path, text: bytes, data: int = 0) -> Callable[[], object]:
    path = folder / "file.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return lambda: file_header(path, fs.CheckpointFormatError)


def _entries(folder: Path, n: int) -> Callable[[], object]:
    n *= 500
    parts = (f'"t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(n))
    return _header(folder, ("{" + ",".join(parts) + "}").encode(), n)


def _one_entry(shape: str) -> bytes:
    return f'{{"a":{{"dtype":"U8","shape":{shape},"data_offsets":[0,0]}}}}'.encode()


def _index(folder: Path, n: int) -> Callable[[], object]:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {f"t{i}": "a.safetensors" for i in range(500 * n)}}))
    return lambda: read_index(path)


def _pickle(folder: Path, data: bytes) -> Callable[[], object]:
    path = folder / "file.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
    return lambda: load_pickled(path)


def _manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> Callable[[], object]:
    step = folder / "root" / "step-1"
    sign(step, change)
    return lambda: read_manifest(step)


def _ranks(raw: dict[str, Any], n: int) -> None:
    raw["world_size"] = n
    for sharding in raw["shardings"]:
        sharding["mesh"] = [n]


def _files(folder: Path, n: int) -> Callable[[], object]:
    return _manifest(folder, lambda raw: raw.update(files=[[1, "0" * 64]] * 500 * n))


FIELDS: dict[str, Callable[[Path, int], Callable[[], object]]] = {
    "tensors in a header": _entries,
    "dimensions of a shape": lambda f, n: _header(f, _one_entry(json.dumps([1 << 62] * 400 * n))),
    "digits of a size": lambda f, n: _header(f, _one_entry("[" + "1" * 40 * n + "]")),
    "depth of a header": lambda f, n: _header(f, b"[" * 1000 * n),
    "a name in a header": lambda f, n: _header(f, _one_entry("[1]").replace(b"a", b"a" * 1000 * n, 1)),
    "names in an index": _index,
    "entries of a pickle": lambda f, n: _pickle(
        f, pickle.dumps({f"t{i}": (i, i) for i in range(500 * n)}, 2)
    ),
    "an index into a pickle's memo": lambda f, n: _pickle(
        f, b"\x80\x02Nr" + struct.pack("<I", n << 20) + b"."
    ),
    "depth of a pickle": lambda f, n: _pickle(
        f, b"\x80\x02" + b"]" * 1000 * n + b"a" * (1000 * n - 1) + b"."
    ),
    "ranks of a manifest": lambda f, n: _manifest(f, lambda raw: _ranks(raw, 1000 * n)),
    "a mesh of 2^30 ranks": lambda f, n: _manifest(f, lambda raw: _ranks(raw, (1 << 30) * n)),
    "files of a step": _files,
    "lists in JSON": lambda f, n: lambda: parse_json(b"[" + b"[]," * 1000 * n + b"1]", "it"),
}


def growth(root: Path) -> tuple[str, int]:
    """The section on what readers cost; wrong is more than 30 times the cost at 10 times the size."""
    (results,) = run_distributed(measured, 1, str(root / "growth"))
    lines, bad = [], 0
    for name, rows in results:
        steps = list(pairwise(rows))
        slow = any(b[1] > 30 * max(a[1], 0.003) for a, b in steps)
        large = any(b[2] > 30 * max(a[2], 1 << 16) for a, b in steps)
        bad += slow or large
        lines.append(
            [
                name,
                " / ".join(f"{size:,}" for size, *_ in rows),
                " / ".join(f"{1e3 * seconds:.1f}" for _, seconds, *_ in rows),
                " / ".join(f"{memory / 1e6:.1f}" for *_, memory, _ in rows),
                " / ".join(outcome for *_, outcome in rows),
                "NO" if slow or large else "yes",
            ]
        )
    text = (
        f"## What readers cost\n\n**{bad} of {len(lines)} grow faster than their file**, at 1, 10 and 100 "
        "times the size of a field.\n\n"
        + table(["field", "bytes", "ms", "peak of memory (MB)", "outcome", "in proportion"], lines)
        + "\n"
    )
    return text, bad


def measured(folder: str) -> list[Growth]:
    results = []
    for name, field in FIELDS.items():
        rows = []
        for number in SIZES:
            root = Path(folder) / f"{len(results)}-{number}"
            root.mkdir(parents=True)
            if "manifest" in name or "step" in name or "mesh" in name:
                model, optimizer = make(width=16)
                fs.save_checkpoint(root / "root", 1, model=model, optimizer=optimizer)
            read = field(root, number)
            size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
            rows.append((size, *_cost(read)))
        results.append((name, rows))
    return results


def _cost(read: Callable[[], object]) -> tuple[float, int, str]:
    seconds = []  # of the CPU, the least of three: other work on the machine is no growth
    for _ in range(3):
        started = time.process_time()
        outcome = _outcome(read)
        seconds.append(time.process_time() - started)
    tracemalloc.start()
    try:
        _outcome(read)
        return min(seconds), tracemalloc.get_traced_memory()[1], outcome
    finally:
        tracemalloc.stop()


def _outcome(read: Callable[[], object]) -> str:
    try:
        read()
    except (fs.FsdpSftError, ValueError):
        return "refused"
    return "read"

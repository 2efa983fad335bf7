"""Every reader beside files that were changed at random: refused, or what is read is what was written.

A file is small, and only what describes it is changed (headers, metadata, manifests): the bytes of tensors
have no checksum in most formats. What fails must fail by name, within seconds, in memory in proportion.
"""

import random
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fsdp_sft as fs
from fsdp_sft._tensors.stored import file_header
from tests.faults.hostile import peak, reset_peak, sign
from tests.faults.kills import make, tensors

SECONDS, TIMES, SPARE = 2.0, 10, 64 << 20
# What a reader may raise: errors of this library, and of the system where it cannot open a file.
ALLOWED = (fs.FsdpSftError, OSError)


@dataclass(frozen=True)
class Reader:
    """A reader, and the part of a file that is changed for it.

    Attributes:
        make: Writes a sound file or folder.
        file: The file that is changed, below it.
        read: Reads it, as values that can be compared.
        part: The bytes of the file that are changed.
        rebuild: Puts changed bytes into the file, which is otherwise right: sizes, checksums.
    """

    make: Callable[[Path], object]
    file: str
    read: Callable[[Path], Any]
    part: Callable[[Path], bytes] = Path.read_bytes
    rebuild: Callable[[Path, bytes], object] = Path.write_bytes


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layers.{i}.weight": torch.randn(4 + i, 3) for i in range(6)} | {"bias": torch.randn(5).half()}


def _save_safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(_tensors(), folder / "model.safetensors", metadata={"format": "pt"})


def _read_safetensors(folder: Path) -> Any:
    path = folder / "model.safetensors"
    entries, data = file_header(path, fs.CheckpointFormatError).entries, path.read_bytes()
    return {
        name: (entry.shape, str(entry.dtype), data[entry.start : entry.end])
        for name, entry in entries.items()
    }


def _header_of(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: 8 + struct.unpack("<Q", data[:8])[0]]


def _with_header(path: Path, header: bytes) -> None:
    path.write_bytes(header + path.read_bytes()[len(_header_of(path)) :])


def _save_step(folder: Path) -> None:
    model, optimizer = make(width=16)
    fs.save_checkpoint(folder / "root", 1, model=model, optimizer=optimizer, train_state={"a": [1, 2.5]})


def _read_step(folder: Path) -> Any:
    model, optimizer = make(width=16)
    loaded = fs.load_checkpoint(folder / "root" / "step-1", model=model, optimizer=optimizer)
    # Not train_state, which is the caller's: with the digest that it must have, any value is right.
    return loaded.step, [t.detach().tolist() for _, t in tensors(model, optimizer)]


def _rebuild_manifest(path: Path, data: bytes) -> None:
    """The manifest with the digest that it then must have, if it still is JSON."""
    path.write_bytes(data)
    try:
        sign(path.parent, lambda raw: raw)
    except (ValueError, KeyError, AttributeError, RecursionError):
        path.write_bytes(data)


READERS: dict[str, Reader] = {
    "header of safetensors": Reader(
        _save_safetensors, "model.safetensors", _read_safetensors, _header_of, _with_header
    ),
    "manifest": Reader(_save_step, "root/step-1/MANIFEST.json", _read_step, rebuild=_rebuild_manifest),
}
FINE = ("refused", "the same", "other names or shapes")


def changed(data: bytes, draw: random.Random) -> bytes:
    """The bytes with a few changes: bits, cuts, repetitions, lengths, numbers and nesting."""
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        if not data:
            return data
        at = draw.randrange(len(data))
        end = min(len(data), at + draw.randrange(1, 64))
        match draw.randrange(6):
            case 0:
                data = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[draw.choice((end, len(data))) :]
            case 2:
                data = data[:end] + data[at:end] * draw.choice((1, 2, 100)) + data[end:]
            case 3:
                number = draw.choice((0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1))
                width = draw.choice((1, 2, 4, 8))
                raw = (number & (1 << 8 * width) - 1).to_bytes(width, "little")
                data = data[:at] + raw + data[at + width :]
            case 4:
                at = draw.choice([i for i in range(len(data)) if 48 <= data[i] <= 57] or [at])
                text = draw.choice(("9" * 30, "-1", "1e999", "0", "4611686018427387904", "NaN", "null"))
                data = data[:at] + text.encode() + data[at + 1 :]
            case 5:
                opened, closed = draw.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"(", b"t"), (b"]", b"a")))
                times = draw.choice((1, 10, 5000))
                data = data[:at] + opened * times + data[at:] + closed * times
    return data


def run_trials(number: int, folder: str) -> list[tuple[str, str]]:
    """(reader, outcome) of each change; an outcome is one of ``FINE`` or what went wrong."""
    results = []
    for name, reader in READERS.items():
        draw = random.Random(f"7 {name}")
        sound = Path(folder, name)
        sound.mkdir()
        reader.make(sound)
        expected, path = reader.read(sound), sound / reader.file
        original, part = path.read_bytes(), reader.part(path)
        for _ in range(number):
            reader.rebuild(path, changed(part, draw))
            results.append((name, _attempt(reader, sound, expected, path.stat().st_size)))
            path.write_bytes(original)
    return results


def _attempt(reader: Reader, folder: Path, expected: Any, size: int) -> str:
    reset_peak()
    base, started = peak(), time.perf_counter()
    try:
        found = reader.read(folder)
        outcome = "the same" if found == expected else "other"
        if isinstance(found, dict) and _kinds(found) != _kinds(expected):
            outcome = "other names or shapes"
    except ALLOWED:
        outcome = "refused"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {str(error)[:80]}"
    seconds, grown = time.perf_counter() - started, peak() - base
    if seconds > SECONDS:
        return f"{seconds:.1f} s"
    return outcome if grown <= TIMES * size + SPARE else f"{grown >> 20} MiB for {size} bytes"


def _kinds(found: dict[str, Any]) -> dict[str, Any]:
    """Names with shapes and dtypes: a model into which they are loaded has its own."""
    return {name: one[:2] if isinstance(one, tuple) else one for name, one in found.items()}

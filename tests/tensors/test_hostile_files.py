"""Files that a stranger made: they cost in proportion to their size, and nothing in them is run."""

import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import fsdp_sft as fs
from fsdp_sft._tensors.safetensors import open_file, read_header
from fsdp_sft.dcp_io.full_state import load_pickled
from fsdp_sft.weights.resolve import open_checkpoint
from tests.harness.hf_folders import save_tiny
from tests.tensors.odd_headers import ODD


def _theirs(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            file.keys()
    except Exception:
        return False
    return True


def _ours(path: Path) -> bool:
    fd = open_file(path)
    try:
        read_header(fd)
    except fs.CheckpointFormatError:
        return False
    finally:
        os.close(fd)
    return True


def test_what_safetensors_refuses_is_refused(tmp_path: Path) -> None:
    path, taken = tmp_path / "odd.safetensors", {}
    for name, contents in ODD.items():
        path.write_bytes(contents)
        taken[name] = (_theirs(path), _ours(path))
    assert [name for name, (theirs, ours) in taken.items() if ours and not theirs] == []
    assert sum(ours for _, ours in taken.values()) >= 10
    assert len(taken) >= 60


def _pairs(levels: int, ending: bytes) -> bytes:
    """A pair of a pair twice, and so on, each named twice: 2^levels parts."""
    named = [b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(levels)]
    return b"\x80\x02K\x01q\x00" + b"".join(named) + ending


class _Executes:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit",)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "a memo of 2^31 entries": (b"\x80\x02Nr\xff\xff\xff\x7fj\xff\xff\xff\x7f.", "NoneType"),
    "pairs of pairs as a key": (_pairs(60, b"}h\x3cNs."), "names a tuple again"),
    "pairs of pairs as a value": (_pairs(60, b"."), "names a tuple again"),
    "lists of lists": (b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".", "it holds list"),
    "a text of 2^62 bytes": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.", "only 2 remain"),
    "a function": (pickle.dumps(_Executes(), 2), "was not run.*exec"),
    "a function by its name on the stack": (pickle.dumps(_Executes()), "was not run"),
    "2^32 bytes": (b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\0\0\0\0\1\x85R.", "bytearray"),
    "a call of a text": (b"\x80\x02X\x01\0\0\0a)R.", "was not run"),
    "an end without a value": (b"\x80\x02.", "cannot be used"),
    "no end": (b"\x80\x02K\x01", "exhausted"),
    "an instruction of extensions": (b"\x80\x02\x82\x01.", "was not run"),
    "a reference": (b"\x80\x02K\x01Q.", "cannot be used"),
    "a key that is no text": (pickle.dumps({3: None}, 2), "a key of it is int"),
    "nothing": (b"", "exhausted"),
}


def _archive(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_pickles_that_cost_more_than_they_are(name: str, tmp_path: Path) -> None:
    data, words = HOSTILE[name]
    path = _archive(tmp_path / "file.pt", data)
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(fs.CheckpointFormatError, match=words):
            load_pickled(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - started < 5


def test_a_compressed_entry_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}." + b"\0" * (64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(fs.CheckpointFormatError, match="compressed"):
            load_pickled(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors", "config.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    (folder / name).unlink(missing_ok=True)
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink(missing_ok=True)
    os.mkfifo(folder / name)
    started = time.perf_counter()
    with pytest.raises((fs.CheckpointFormatError, OSError), match="not a regular file"):
        fs.build_meta_model(folder) if name == "config.json" else open_checkpoint(folder)
    assert time.perf_counter() - started < 5


def _header_of(entries: int) -> bytes:
    texts = (f'"t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(entries))
    text = ("{" + ",".join(texts) + "}").encode()
    return struct.pack("<Q", len(text)) + text + bytes(entries)


def _seconds_and_bytes(read: Callable[[], object]) -> tuple[float, int]:
    read()
    started = time.process_time()
    read()
    seconds = time.process_time() - started
    tracemalloc.start()
    try:
        kept = read()
        return seconds, tracemalloc.get_traced_memory()[1] if kept is not None else 0
    finally:
        tracemalloc.stop()


def test_readers_cost_in_proportion(tmp_path: Path) -> None:
    """At 1, 10 and 100 times the size, at most 20 and 200 times the cost: the rest is noise of a machine."""

    def header(data: bytes) -> object:
        path = tmp_path / "file.safetensors"
        path.write_bytes(data)
        fd = open_file(path)
        try:
            return read_header(fd)
        finally:
            os.close(fd)

    costs = [_seconds_and_bytes(lambda size=size: header(_header_of(size))) for size in (300, 3000, 30_000)]
    assert costs[1][1] < 20 * costs[0][1]
    assert costs[2][1] < 200 * costs[0][1]
    assert costs[2][0] < 50 * max(costs[1][0], 0.02)

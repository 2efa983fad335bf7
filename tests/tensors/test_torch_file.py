"""Files of ``torch.save``: nothing in them is run, and what a stranger made costs no more than its size."""

import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_sft.dcp_io.full_state import load_pickled
from fsdp_sft.errors import CheckpointFormatError


class _Opens:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


class _InAnItem(_Opens):
    """A class that every state dict may name, with an item that none should have."""

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter([("key", _Opens(self.mark))])


@pytest.mark.parametrize("kind", [_Opens, _InAnItem])
@pytest.mark.parametrize("place", ["the whole file", "a value", "a list"])
def test_a_pickle_that_wants_to_run_code(
    tmp_path: Path, kind: type[_Opens], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mark = tmp_path / "model.pt", tmp_path / "the code ran"
    payload = kind(mark)
    contents: dict[str, Any] = {
        "the whole file": payload,
        "a value": {"norm.weight": payload},
        "a list": {"norm.weight": [torch.zeros(1), payload]},
    }
    torch.save(contents[place], path)
    torch.load(path, weights_only=False)
    assert mark.exists(), "the payload does nothing, so the test would show nothing"
    mark.unlink()
    # What torch takes from the environment must not open the door again.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(CheckpointFormatError, match="more than tensors, and was not run"):
        load_pickled(path)
    path.write_bytes(pickle.dumps(contents[place]))  # as formats before the archive: code from the first byte
    with pytest.raises(CheckpointFormatError, match="not a zip archive"):
        load_pickled(path)
    assert not mark.exists()


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
        with pytest.raises(CheckpointFormatError, match=words):
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
        with pytest.raises(CheckpointFormatError, match="compressed"):
            load_pickled(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def _state() -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.randn(6, 4).bfloat16() for name in ("a", "b")}


def _save_cut(path: Path) -> None:
    torch.save(_state(), path)
    os.truncate(path, path.stat().st_size - 500)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (_save_cut, "cannot be used"),
    "nothing": (lambda path: path.write_bytes(b""), "not a zip archive"),
    "of torch 1.5": (
        lambda path: torch.save(_state(), path, _use_new_zipfile_serialization=False),
        "before torch 1.6",
    ),
    "sparse": (lambda path: torch.save({"a": torch.eye(3).to_sparse()}, path), "plain numbers"),
    "nested": (
        lambda path: torch.save({"state_dict": OrderedDict(_state()), "epoch": 3}, path),
        "'state_dict' is OrderedDict, not a tensor",
    ),
    "a list": (lambda path: torch.save([torch.zeros(3)], path), "list, not a dictionary"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_used(name: str, tmp_path: Path) -> None:
    save, words = DAMAGES[name]
    save(tmp_path / "model.pt")
    with pytest.raises(CheckpointFormatError, match=words):
        load_pickled(tmp_path / "model.pt")


def test_what_torch_saves(tmp_path: Path) -> None:
    base = torch.randn(6, 5)
    state = {
        "first": base[:2],
        "rest": base[2:],
        "again": base,
        "transposed": torch.randn(3, 5).t(),
        "expanded": torch.ones(1).expand(32),
        "negated": torch.ones(32, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "bools": torch.tensor([True, False]),
        "half": torch.randn(3).half(),
        "bf16": torch.randn(3, 4).bfloat16(),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([1, 2], dtype=torch.uint16),
    }
    path = tmp_path / "model.pt"
    torch.save(state, path)
    for _ in range(2):
        found = load_pickled(path)
        assert found.keys() == state.keys()
        for name, tensor in state.items():
            assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
            assert found[name].float().tolist() == tensor.float().tolist(), name
        _zip_again(path)  # places are those of the archive's records, not those that torch would have used


def _zip_again(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)

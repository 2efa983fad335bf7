"""The byte level: against the reference implementation, and against damaged and hostile headers."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fsdp_sft._tensors import safetensors as st


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        "longs": torch.arange(7),
        "bf16": torch.randn(3, 5).bfloat16(),
        "f64": torch.randn(2, 2, dtype=torch.float64),
        "f8": torch.randn(5).to(torch.float8_e4m3fn),
        "näme.with.dots": torch.randn(4, 1, 3),
        "u32": torch.tensor([1, 2**32 - 1], dtype=torch.uint32),
    }


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    fd, header, _ = st.create(
        path, {name: (t.dtype, t.shape) for name, t in tensors.items()}, {"format": "pt"}
    )
    for name, tensor in tensors.items():
        st.write_at(fd, header.entries[name].start, st.bytes_of(tensor))
    os.close(fd)


def _header_of(path: Path) -> st.Header:
    fd = st.open_file(path)
    try:
        return st.read_header(fd)
    finally:
        os.close(fd)


def test_the_reference_implementation_reads_what_is_written(tmp_path: Path) -> None:
    tensors = _tensors()
    _write(tmp_path / "a.safetensors", tensors)
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert st.bytes_of(loaded[name]) == st.bytes_of(tensor), name
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_the_reference_implementation_writes_is_read(tmp_path: Path) -> None:
    tensors = _tensors()
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = _header_of(path)
    assert header.metadata == {"format": "pt"}
    fd = st.open_file(path)
    for name, tensor in tensors.items():
        entry = header.entries[name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape))
        buffer = bytearray(entry.num_bytes)
        st.read_at(fd, entry.start, memoryview(buffer))
        assert memoryview(buffer) == st.bytes_of(tensor), name
    with pytest.raises(st.CheckpointFormatError, match="too early"):
        st.read_at(fd, header.file_bytes - 1, memoryview(bytearray(2)))
    os.close(fd)


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    _write(tmp_path / "a.safetensors", _tensors())
    for entry in _header_of(tmp_path / "a.safetensors").entries.values():
        assert entry.start % entry.dtype.itemsize == 0


ENTRY: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"a": ENTRY}, 7),
        ({"a": ENTRY}, 9),
        ({"a": {**ENTRY, "shape": [3]}}, 8),
        ({"a": {**ENTRY, "shape": [-2]}}, 8),
        ({"a": {**ENTRY, "shape": [True, 2]}}, 8),
        ({"a": {**ENTRY, "shape": "ab"}}, 8),
        ({"a": {**ENTRY, "dtype": "F4", "shape": [16]}}, 8),
        ({"a": {**ENTRY, "dtype": ["F32"]}}, 8),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, 8),
        ({"a": {"dtype": "F32"}}, 8),
        ({"a": 1}, 8),
        ({"a": ENTRY, "b": ENTRY}, 8),
        ({"a": {**ENTRY, "data_offsets": [8, 16]}}, 16),
        ({"__metadata__": {"x": 1}}, 0),
        ([1], 0),
    ],
)
def test_a_header_that_lies_is_refused(header: Any, size: int, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    with pytest.raises(st.CheckpointFormatError, match="no safetensors file"):
        _header_of(tmp_path / "a")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"{]",
        struct.pack("<Q", 2) + b"\xff\xfe",
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        struct.pack("<Q", 17) + b'{"a":{},  "a":{}}',
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(st.CheckpointFormatError):
        _header_of(tmp_path / "a")


def test_links_and_special_files_are_not_opened(tmp_path: Path) -> None:
    _write(tmp_path / "a", {"x": torch.zeros(1)})
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        st.open_file(tmp_path / "link")
    with pytest.raises(st.CheckpointFormatError, match="regular"):
        st.open_file(tmp_path / "pipe")
    with pytest.raises(FileExistsError):
        st.create(tmp_path / "a", {})


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    with pytest.raises(st.CheckpointFormatError, match="complex128"):
        st.create(tmp_path / "new", {"a": (torch.complex128, [1])})

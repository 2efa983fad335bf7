"""The byte level: against the reference implementation, and against damaged and hostile headers."""

import os
from pathlib import Path

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

"""The byte level: against the reference implementation, and against damaged and hostile headers."""

import os
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fsdp_sft as fs
from fsdp_sft._tensors import safetensors as st
from fsdp_sft.weights.resolve import open_checkpoint
from tests.harness.hf_folders import save_tiny
from tests.tensors.odd_headers import ODD


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


def test_files_are_those_of_the_reference_implementation(tmp_path: Path) -> None:
    """What either writes is read by both."""
    tensors, ours, theirs = _tensors(), tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    _write(ours, tensors)
    save_file(tensors, theirs, metadata={"format": "pt"})
    for path in (ours, theirs):
        header, loaded, data = _header_of(path), load_file(path), path.read_bytes()
        assert header.metadata == {"format": "pt"}
        assert loaded.keys() == header.entries.keys() == tensors.keys()
        for name, tensor in tensors.items():
            entry, read = header.entries[name], loaded[name]
            assert (
                (entry.dtype, entry.shape)
                == (tensor.dtype, tuple(tensor.shape))
                == (read.dtype, tuple(read.shape))
            ), name
            assert data[entry.start : entry.end] == bytes(st.bytes_of(tensor)), name
            assert st.bytes_of(read) == st.bytes_of(tensor), name
            assert path == theirs or entry.start % entry.dtype.itemsize == 0, "aligned"


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


def _theirs(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            file.keys()
    except Exception:
        return False
    return True


def _ours(path: Path) -> bool:
    try:
        _header_of(path)
    except st.CheckpointFormatError:
        return False
    return True


def test_what_safetensors_refuses_is_refused(tmp_path: Path) -> None:
    path, taken = tmp_path / "odd.safetensors", {}
    for name, contents in ODD.items():
        path.write_bytes(contents)
        taken[name] = (_theirs(path), _ours(path))
    assert [name for name, (theirs, ours) in taken.items() if ours and not theirs] == []
    assert sum(ours for _, ours in taken.values()) >= 10


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors", "config.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    (folder / name).unlink(missing_ok=True)
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink(missing_ok=True)
    os.mkfifo(folder / name)
    started = time.perf_counter()
    with pytest.raises((st.CheckpointFormatError, OSError), match="not a regular file"):
        fs.build_meta_model(folder) if name == "config.json" else open_checkpoint(folder)
    assert time.perf_counter() - started < 5

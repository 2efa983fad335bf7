"""Files of ``torch.save``: mapped into memory; nothing in them is ever run."""

import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_sft.dcp_io.full_state import load_pickled
from fsdp_sft.errors import CheckpointFormatError


def _pickled(path: Path) -> Path:
    """A file of ``torch.save``, with tied names that share a storage."""
    torch.manual_seed(0)
    state = {f"{name}.weight": torch.randn(6, 4).bfloat16() for name in ("a", "b", "c", "norm")}
    torch.save(OrderedDict({**state, "tied.weight": state["a.weight"]}), path)
    return path


class _Opens:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


class _Executes(_Opens):
    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.mark)!r}, 'w')",)


class _InAnItem(_Opens):
    """A class that every state dict may name, with an item that none should have."""

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter([("key", _Executes(self.mark))])


@pytest.mark.parametrize("kind", [_Opens, _Executes, _InAnItem])
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


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _legacy(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    torch.save(state, path, _use_new_zipfile_serialization=False)


def _rezipped(path: Path, **changes: Any) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    root = next(iter(records)).partition("/")[0]
    compression = changes.pop("compression", zipfile.ZIP_STORED)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, changes.get(name.removeprefix(root + "/"), data))


def _compressed(path: Path) -> None:
    _rezipped(path, compression=zipfile.ZIP_DEFLATED)


def _sparse(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    state["a.weight"] = state["a.weight"].float().to_sparse()
    torch.save(state, path)


def _nested(path: Path) -> None:
    torch.save({"state_dict": torch.load(path, weights_only=True), "epoch": 3}, path)


def _a_list(path: Path) -> None:
    torch.save([torch.zeros(3)], path)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (_truncated, "cannot be used"),
    (_empty, "not a zip archive"),
    (_legacy, "before torch 1.6"),
    (_compressed, "compressed"),
    (_sparse, "plain numbers"),
    (_nested, "'state_dict' is OrderedDict, not a tensor"),
    (_a_list, "list, not a dictionary"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=lambda value: getattr(value, "__name__", "")[1:])
def test_what_cannot_be_used(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    path = _pickled(tmp_path / "model.pt")
    damage(path)
    with pytest.raises(CheckpointFormatError, match=words):
        load_pickled(path)


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
    torch.save(state, tmp_path / "model.pt")
    found = load_pickled(tmp_path / "model.pt")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        assert found[name].float().tolist() == tensor.float().tolist(), name


def test_an_archive_that_others_wrote(tmp_path: Path) -> None:
    """Places are those of the archive's records, and not those at which torch would have put them."""
    path = _pickled(tmp_path / "model.pt")
    expected = torch.load(path, weights_only=True)
    _rezipped(path)
    found = load_pickled(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

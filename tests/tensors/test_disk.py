"""Files and folders: read in parts, published whole, and nothing left behind."""

from pathlib import Path

import pytest
import torch

from fsdp_sft._tensors.boxes import Box
from fsdp_sft._tensors.disk import publish, sweep, temporary_beside, write_tensors
from fsdp_sft._tensors.reader import do_reads
from fsdp_sft._tensors.stored import StoredFolder


def test_parts_of_columns_are_read(tmp_path: Path) -> None:
    tensor = torch.randn(6, 5, 4)
    write_tensors(tmp_path / "a.safetensors", {"x": tensor[:, :3], "y": torch.tensor(2.5)})
    write_tensors(tmp_path / "b.safetensors", {"x": tensor[:, 3:]})
    chunks = [("a.safetensors", Box((0, 0, 0), (6, 3, 4))), ("b.safetensors", Box((0, 3, 0), (6, 2, 4)))]
    files = StoredFolder(tmp_path)
    out = torch.zeros(4, 3, 2)
    back = torch.zeros(5, 6, 4).transpose(0, 1)
    cast = torch.zeros(6, 5, 4, dtype=torch.float64)
    scalar = torch.zeros(())
    reads = [
        *files.reads("x", chunks, Box((1, 2, 1), (4, 3, 2)), out),
        *files.reads("x", chunks, Box((0, 0, 0), (6, 5, 4)), back),
        *files.reads("x", chunks, Box((0, 0, 0), (6, 5, 4)), cast),
        *files.reads("y", [("a.safetensors", Box((), ()))], Box((), ()), scalar),
    ]
    num_bytes = do_reads(reads, workers=3)
    assert num_bytes >= 4 * (2 * tensor.numel() + out.numel() + 1)
    assert torch.equal(out, tensor[1:5, 2:5, 1:3])
    assert torch.equal(back, tensor)
    assert torch.equal(cast, tensor.double())
    assert scalar.item() == 2.5


def test_a_folder_appears_whole_and_takes_the_place_of_an_empty_one(tmp_path: Path) -> None:
    target = tmp_path / "out[1]"  # characters that a glob pattern would take for something else
    target.mkdir()
    left, other = temporary_beside(target), temporary_beside(tmp_path / "out1")
    for folder in (left, other):
        folder.mkdir()
        (folder / "file").write_text("of a job that was killed")
    sweep(tmp_path, target.name)
    assert not left.exists()
    assert other.exists(), "of another target"
    made = temporary_beside(target)
    made.mkdir()
    (made / "file").write_text("new")
    publish(made, target)
    assert (target / "file").read_text() == "new"
    assert not made.exists()
    again = temporary_beside(target)
    again.mkdir()
    with pytest.raises(OSError, match="not empty"):
        publish(again, target)
    assert (target / "file").read_text() == "new"


def test_what_is_there_can_be_moved_aside(tmp_path: Path) -> None:
    target, made, aside = (tmp_path / name for name in ("step-3", "made", "aside"))
    for folder, text in ((target, "old"), (made, "new")):
        folder.mkdir()
        (folder / "file").write_text(text)
    publish(made, target, aside=aside)
    assert (target / "file").read_text() == "new"
    assert (aside / "file").read_text() == "old"

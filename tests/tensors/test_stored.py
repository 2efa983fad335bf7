"""Tensors that are stored in another form than they are published in, read through renamings and joins."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fsdp_sft as fs
from fsdp_sft._tensors.boxes import Box, chunk_of, whole
from fsdp_sft._tensors.jobs import ByteRange
from fsdp_sft._tensors.reader import read_jobs
from fsdp_sft._tensors.safetensors import TensorEntry, num_bytes
from fsdp_sft._tensors.stored import Computed, StoredFolder
from fsdp_sft.weights import load, provenance, resolve
from tests.harness.models import tiny_model

BLOCK = 4  # rows that share a scale


def _quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8, and a float32 scale for every four rows; exact halves, so that there is one right answer."""
    blocks = weight.float().split(BLOCK)
    scales = torch.stack([block.abs().max() / 127 for block in blocks])
    return torch.cat([(b / s).round().to(torch.int8) for b, s in zip(blocks, scales, strict=True)]), scales


def _published(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows = scales.repeat_interleave(BLOCK)[: len(packed)]
    return (packed.float() * rows[:, None]).to(torch.bfloat16)


def _computed(folder: StoredFolder, name: str) -> Computed:
    """What a reader of such a format would say of one tensor; its two parts lie in two files."""
    packed = folder.header("packed.safetensors").entries[name]
    scales = folder.header("scales.safetensors").entries[name]
    width = packed.shape[1]

    def runs(first: int, last: int) -> tuple[ByteRange, ...]:
        blocks = range(first // BLOCK, -(-last // BLOCK))
        return (
            ByteRange(
                folder.folder / "packed.safetensors", packed.start + first * width, (last - first) * width
            ),
            ByteRange(folder.folder / "scales.safetensors", scales.start + 4 * blocks.start, 4 * len(blocks)),
        )

    def compute(raws: list[torch.Tensor], first: int, last: int) -> torch.Tensor:
        return _published(raws[0].view(torch.int8).view(last - first, width), raws[1].view(torch.float32))

    size = num_bytes(torch.bfloat16, packed.shape)
    return Computed(TensorEntry(torch.bfloat16, packed.shape, 0, size), BLOCK, runs, compute)


def _write(folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights stored in that form; what they are published as."""
    parts = {name: _quantised(weight) for name, weight in weights.items()}
    save_file({name: packed for name, (packed, _) in parts.items()}, folder / "packed.safetensors")
    save_file({name: scales for name, (_, scales) in parts.items()}, folder / "scales.safetensors")
    return {name: _published(*both) for name, both in parts.items()}


def _moved(a: Any, b: Any) -> Any:
    """Two matrices (22, 6) as a conversion may lay them out: transposed, cut, joined, stacked."""
    halves = [
        torch.cat([one.t().chunk(2, 1)[0], other.t().chunk(2, 1)[1]]) for one, other in ((a, b), (b, a))
    ]
    return torch.stack(halves)


@pytest.mark.parametrize("rows_bytes", [1, 60, 8 << 20])
@pytest.mark.parametrize("workers", [1, 3])
def test_any_box_of_what_a_conversion_made(
    tmp_path: Path, workers: int, rows_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_sft._tensors.stored._ROWS_BYTES", rows_bytes)
    published = _write(tmp_path, {name: torch.randn(22, 6) for name in ("a", "b")})
    folder = StoredFolder(tmp_path)
    stored = {name: _computed(folder, name) for name in published}
    moved = _moved(*(provenance.source(n, s.entry.shape, s.entry.dtype) for n, s in stored.items()))
    expected = _moved(*published.values())
    every = whole(expected.shape)
    boxes = [every, Box((1, 3, 2), (1, 5, 7)), Box((0, 11, 10), (2, 1, 1))]
    boxes += [chunk_of(every, dim, 5, index) for dim, index in itertools.product((1, 2), range(5))]
    for box in boxes:
        out = torch.full(box.shape, torch.nan)
        jobs = [job for piece in moved.pieces for job in stored[piece.key].jobs("moved", piece, box, out)]
        assert read_jobs(jobs, workers=workers) > 0 or not box.numel
        assert torch.equal(out, expected[box.slices].float()), box


def test_a_model_whose_weights_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture, whose experts transformers joins and stacks: bitwise what it makes of published ones."""
    plain = tiny_model("mixtral").to(torch.bfloat16)
    plain.save_pretrained(tmp_path / "published")
    found = resolve.open_checkpoint(tmp_path / "published")
    values = {name: torch.empty(s.entry.shape, dtype=s.entry.dtype) for name, s in found.sources.items()}
    read_jobs(
        job
        for n, s in found.sources.items()
        for job in s.jobs(n, s.piece(n), whole(values[n].shape), values[n])
    )
    matrices = {name: value for name, value in values.items() if value.ndim == 2}
    published = _write(tmp_path, matrices)
    save_file(
        {**values, **published}, tmp_path / "published" / "model.safetensors", metadata={"format": "pt"}
    )
    expected = type(plain).from_pretrained(tmp_path / "published", dtype=torch.float32)

    folder = StoredFolder(tmp_path)
    open_checkpoint = resolve.open_checkpoint

    def opened(*args: Any, **options: Any) -> resolve.Checkpoint:
        checkpoint = open_checkpoint(*args, **options)
        sizes = {tmp_path / f"{kind}.safetensors": 0 for kind in ("packed", "scales")}
        sources = {n: _computed(folder, n) if n in matrices else s for n, s in checkpoint.sources.items()}
        return resolve.Checkpoint({**checkpoint.file_bytes, **sizes}, sources)

    monkeypatch.setattr(load, "open_checkpoint", opened)
    model = fs.build_meta_model(tmp_path / "published")
    report = fs.load_weights(model, tmp_path / "published")
    assert report.class_bytes["other"] == 0
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_values_that_are_not_finite_are_told_of_computed_tensors(tmp_path: Path) -> None:
    _write(tmp_path, {"a": torch.randn(8, 6)})
    save_file({"a": torch.tensor([1.0, torch.inf])}, tmp_path / "scales.safetensors")
    stored = _computed(StoredFolder(tmp_path), "a")
    read = partial(stored.jobs, "layer.weight", stored.piece("a"), whole((8, 6)), torch.empty(8, 6))
    read_jobs(read())
    with pytest.raises(fs.CheckpointFormatError, match=r"layer\.weight"):
        read_jobs(read(check_finite=True))


def test_a_run_that_is_missing_names_its_file(tmp_path: Path) -> None:
    _write(tmp_path, {"a": torch.randn(8, 6)})
    stored = _computed(StoredFolder(tmp_path), "a")
    path = tmp_path / "scales.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(fs.CheckpointFormatError, match=r"scales\.safetensors cannot be read .*'a'"):
        read_jobs(stored.jobs("x", stored.piece("a"), whole((8, 6)), torch.empty(8, 6)))

"""A folder whose matrices are stored in another form than they are published in loads as if published."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft._tensors.jobs import ByteRange
from fsdp_sft._tensors.safetensors import TensorEntry
from fsdp_sft._tensors.stored import Computed, InFile, Stored
from tests.harness.composed import composed
from tests.harness.device import mesh_here
from tests.harness.hf_folders import difference, plain, rewrite, save_tiny, tensors_of
from tests.harness.ranks import run_distributed

WIDE = {"hidden_size": 128, "intermediate_size": 1280, "vocab_size": 1003}


def _turned(path: Path, entry: TensorEntry) -> Stored:
    """A matrix whose transpose is what the file has: its rows are columns there."""
    if len(entry.shape) != 2:
        return InFile(path, entry)
    height, width = entry.shape
    size = entry.dtype.itemsize

    def runs(first: int, last: int) -> tuple[ByteRange, ...]:
        if last - first == width:
            return (ByteRange(path, entry.start, entry.num_bytes),)
        starts = range(entry.start + first * size, entry.start + entry.num_bytes, width * size)
        return tuple(ByteRange(path, start, (last - first) * size) for start in starts)

    def compute(raws: list[torch.Tensor], first: int, last: int) -> torch.Tensor:
        return torch.cat(raws).view(entry.dtype).view(height, last - first).t()

    return Computed(replace(entry, shape=(width, height)), 1, runs, compute)


def _saved(folder: Path, family: str, *, differing: bool = False, **sizes: int) -> None:
    """A published folder, and beside it the same with each matrix transposed."""
    save_tiny(folder / "published", family, **sizes)
    save_tiny(folder / "turned", family, **sizes)
    tensors = tensors_of(folder / "published")
    if differing:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
        rewrite(folder / "published", tensors)
    turned = {name: t.t().contiguous() if t.ndim == 2 else t for name, t in tensors.items()}
    rewrite(folder / "turned", turned)


def _load(folder: Path, strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp_sft.weights.resolve._stored", _turned)
        model: Any = composed(folder / "turned", mesh=mesh_here(), strategy=strategy)
    assert difference(model, plain(folder / "published")) == []
    report = model.load_report
    assert report.class_bytes["other"] == 0, "each rank reads its own part, of what is joined too"
    whole = sum(t.nbytes for t in tensors_of(folder / "published").values())
    assert report.job_bytes_read < 1.1 * whole


@pytest.mark.parametrize("strategy", ["slice", "exchange"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_it_loads_as_the_published_one(tmp_path: Path, family: str, strategy: str) -> None:
    _saved(tmp_path, family, **WIDE)
    run_distributed(_load, 2, tmp_path, strategy)


def _load_different(folder: Path) -> None:
    _load(folder, "slice")


def test_tied_names_of_different_values_stay_apart(tmp_path: Path) -> None:
    _saved(tmp_path, "qwen2-tied", differing=True)
    run_distributed(_load_different, 2, tmp_path)
    assert fs.build_meta_model(tmp_path / "published").config.tie_word_embeddings

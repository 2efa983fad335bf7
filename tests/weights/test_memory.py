"""Memory of a load: the shards and buffers, also where what is stored is transposed."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_sft as fs
from fsdp_sft._tensors.safetensors import create
from tests.faults.hostile import peak, reset_peak
from tests.harness.layouts import register_layout
from tests.harness.models import FLOAT32
from tests.harness.ranks import mesh_here, run_distributed

MIB = 1 << 20
BUFFER_BYTES = 16 * MIB
RANKS = 2
WIDTH, INNER = 512, 1024

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")


def _save_sparse(folder: Path, *, layers: int, vocab: int) -> int:
    """A bf16 checkpoint without data on the disk, in the "transpose" layout; bytes of its largest tensor."""
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=vocab,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in LlamaForCausalLM(config).named_parameters()}
    stored = {
        name.replace("mlp.down_proj", "mlp.down"): shape[::-1] if "mlp.down_proj" in name else shape
        for name, shape in shapes.items()
    }
    fd, *_ = create(
        folder / "model.safetensors",
        {name: (torch.bfloat16, shape) for name, shape in stored.items()},
        {"format": "pt"},
    )
    os.close(fd)
    return 2 * vocab * WIDTH


def _model(folder: Path) -> Any:
    return fs.shard_model(fs.build_meta_model(folder), mesh=mesh_here(), mp_policy=FLOAT32)


def _beyond_shards(folder: Path) -> int:
    register_layout("transpose")
    fs.load_weights(_model(folder / "small"), folder / "small")  # imports, gloo's buffers
    model = _model(folder / "large")
    gc.collect()
    reset_peak()
    before = peak()
    fs.load_weights(model, folder / "large")
    growth = peak() - before
    shards = [parameter.to_local() for parameter in model.parameters()]
    assert not any(local.any() for local in shards), "what a sparse file holds is zeros"
    return growth - sum(local.nbytes for local in shards)


def _measure(folder: Path, scale: int) -> int:
    """Most bytes beyond the shards on any rank."""
    folder.mkdir()
    _save_sparse(folder / "small", layers=1, vocab=128)
    largest = _save_sparse(folder / "large", layers=8 * scale, vocab=131072 * scale)
    assert largest // RANKS > BUFFER_BYTES, "reading a rank's part of it in one go has to show"
    return max(run_distributed(_beyond_shards, RANKS, folder))


def test_beyond_the_shards_there_are_the_buffers(tmp_path: Path) -> None:
    # One bound for both sizes: how much is in use at once is a matter of the threads' timing.
    for scale in (1, 2):
        beyond = _measure(tmp_path / str(scale), scale)
        if beyond > BUFFER_BYTES:  # what else a rank happens to allocate only adds
            beyond = min(beyond, _measure(tmp_path / f"{scale} again", scale))
        assert beyond <= BUFFER_BYTES, f"{beyond / MIB:.1f} MiB beyond the shards of size {scale}"

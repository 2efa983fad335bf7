"""A checkpoint that brings its own modeling file: refused without trust, bitwise right with it, offline."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft.pretrained import load_pretrained
from fsdp_sft.weights import CheckpointFormatError, build_meta_model, load_weights
from fsdp_sft.weights.hub import resolve_folder
from tests.checkpoints import difference, rewrite, save_tiny, tensors_of
from tests.distributed import run_distributed
from tests.hub_server import serve
from tests.models import full
from tests.test_weights_faults import _use_hub

CONFIG = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own-llama"

    def __init__(self, offset=2.0, **kwargs):
        self.offset = offset
        super().__init__(**kwargs)
"""
MODEL = """
import pathlib

from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig
from .parts_own import Shifted

(pathlib.Path(__file__).parent / "imported").touch()


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.norm = Shifted(config.hidden_size, config.offset)
        self.post_init()
"""
PARTS = """
import torch
from torch import nn


class Shifted(nn.Module):
    def __init__(self, size, offset):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("offset", torch.full((), offset))

    def forward(self, hidden):
        return hidden * self.weight + self.offset
"""


def save_with_code(folder: Path, parts: str = PARTS, **extra: torch.Tensor) -> Path:
    """A Llama with a norm of its own, as ``save_pretrained`` of such a class would leave it.

    Args:
        folder: Of the checkpoint.
        parts: Code of the norm's class.
        **extra: What the norm has stored beside its weight.
    """
    save_tiny(folder)
    for name, text in (("configuration_own", CONFIG), ("modeling_own", MODEL), ("parts_own", parts)):
        (folder / f"{name}.py").write_text(text)
    config = json.loads((folder / "config.json").read_text())
    config.update(
        model_type="own-llama",
        architectures=["OwnForCausalLM"],
        offset=2.0,
        auto_map={
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    )
    (folder / "config.json").write_text(json.dumps(config))
    own = {
        f"model.norm.{name}": tensor for name, tensor in (extra or {"offset": torch.tensor(0.625)}).items()
    }
    rewrite(folder, {**tensors_of(folder), **own}, files=2)
    return folder


def _imported(modules: Path) -> bool:
    return any(path.name == "imported" for path in modules.rglob("*"))


def keep_code_in(modules: Path) -> None:
    """Copies of the code go to a folder of the test, and nothing reaches the network."""
    from transformers import dynamic_module_utils
    from transformers.utils import hub

    dynamic_module_utils.HF_MODULES_CACHE = hub.HF_MODULES_CACHE = str(modules)

    def connect(self: Any, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"tried to reach {address}")
        original(self, address)

    original = socket.socket.connect
    socket.socket.connect = connect  # type: ignore[method-assign]


def plain_with_code(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).train()


def _check_refused(folder: Path, modules: Path) -> None:
    keep_code_in(modules)
    for build in (
        lambda: build_meta_model(folder),
        lambda: load_pretrained(folder, mesh=fs.build_mesh(device_type="cpu")),
    ):
        with pytest.raises(CheckpointFormatError, match="trust_remote_code"):
            build()
    assert not _imported(modules)


def test_refused_without_trust(tmp_path: Path) -> None:
    run_distributed(_check_refused, 2, save_with_code(tmp_path / "model"), tmp_path / "modules")


def _check_loads(folder: Path, modules: Path, together: bool) -> None:
    keep_code_in(modules if together else modules / str(dist.get_rank()))
    mesh = fs.build_mesh(device_type="cpu")
    model = build_meta_model(folder, trust_remote_code=True)
    fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    load_weights(model, folder)
    oracle = plain_with_code(folder)
    assert difference(model, oracle) == []
    assert float(full(model.model.norm.offset)) == 0.625
    ids = torch.arange(3, 21).view(2, 9)
    assert torch.equal(model(input_ids=ids).logits, oracle(input_ids=ids).logits)
    composed = load_pretrained(folder, mesh=mesh, mp_policy=MixedPrecisionPolicy(), trust_remote_code=True)
    assert difference(composed, oracle) == []
    assert _imported(modules)


@pytest.mark.parametrize("together", [True, False], ids=["one module cache", "a module cache each"])
def test_bitwise_with_trust(tmp_path: Path, together: bool) -> None:
    run_distributed(_check_loads, 2, save_with_code(tmp_path / "model"), tmp_path / "modules", together)


def _check_hub(address: str, cache: Path, modules: Path, folder: Path) -> None:
    _use_hub(address, cache)
    keep_code_in(modules / str(dist.get_rank()))
    assert not list(resolve_folder("someone/model").glob("*.py"))
    with pytest.raises(CheckpointFormatError, match="trust_remote_code"):
        load_pretrained("someone/model", mesh=fs.build_mesh(device_type="cpu"))
    model = load_pretrained("someone/model", mesh=fs.build_mesh(device_type="cpu"), trust_remote_code=True)
    assert difference(model, plain_with_code(folder)) == []


def test_from_the_hub(tmp_path: Path) -> None:
    folder = save_with_code(tmp_path / "model")
    with serve(folder, drops=0) as (address, _):
        run_distributed(_check_hub, 2, address, tmp_path / "cache", tmp_path / "modules", folder)

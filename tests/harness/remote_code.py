"""Checkpoints that bring their own modeling code, and a cache of the test's own for it."""

import socket
from pathlib import Path
from typing import Any

import torch

from tests.harness.hf_folders import configure, rewrite, save_tiny, tensors_of

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
    configure(
        folder,
        model_type="own-llama",
        architectures=["OwnForCausalLM"],
        offset=2.0,
        auto_map={
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    )
    extra = extra or {"offset": torch.tensor(0.625)}
    own = {f"model.norm.{name}": tensor for name, tensor in extra.items()}
    rewrite(folder, {**tensors_of(folder), **own}, files=2)
    return folder


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

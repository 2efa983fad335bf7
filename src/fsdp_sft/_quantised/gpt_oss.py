"""Checkpoints with experts in MXFP4, as OpenAI publishes gpt-oss.

Source: transformers/quantizers/quantizer_mxfp4.py.
"""

from collections.abc import Iterable

import torch

from fsdp_sft._quantised import fp4
from fsdp_sft._quantised.method import Method
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._quantised.tensors import Tensors


def check(settings: Settings) -> None:
    """Refuse nothing: the config has no field on which the values depend."""


def find(tensors: Tensors, keys: Iterable[str]) -> None:
    """Add all experts."""
    for key in keys:
        name = key.removesuffix("_blocks")
        if name != key and tensors.is_of(key, torch.uint8):
            fp4.find_experts(tensors, name, key, f"{name}_scales")


METHOD = Method(
    check,
    find,
    r"_(blocks|scales)$",
    lambda settings: 4.25,
    only_experts=True,
    skips=("modules_to_not_convert",),
)

"""Checkpoints with experts in MXFP4, as OpenAI publishes gpt-oss.

Source: transformers/quantizers/quantizer_mxfp4.py.
"""

from collections.abc import Iterable

import torch

from fsdp_sft._quantised import elements
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._quantised.tensors import Entries, Method, Tensors
from fsdp_sft._tensors.stored import Ints


def check(settings: Settings) -> None:
    """Refuse nothing: the config has no field on which the values depend."""


def find(tensors: Tensors, keys: Iterable[str]) -> None:
    """Add all experts."""
    for key in keys:
        name = key.removesuffix("_blocks")
        if name != key and tensors.is_of(key, torch.uint8):
            elements.find_experts(tensors, name, key, f"{name}_scales")


def stored_as(settings: Settings, shape: Ints) -> Entries | None:
    """One row of experts of that shape, which are transposed in the model."""
    if len(shape) < 3 or shape[-2] % 32:
        return None
    blocks = shape[-2] // 32
    return {"w_blocks": (torch.uint8, (1, 1, blocks, 16)), "w_scales": (torch.uint8, (1, 1, blocks))}


METHOD = Method(
    check,
    find,
    r"_(blocks|scales)$",
    lambda settings: 4.25,
    stored_as=stored_as,
    skips=("modules_to_not_convert",),
)

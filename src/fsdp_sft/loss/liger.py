"""Liger's fused linear cross entropy, where its kernels are installed (CUDA only)."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


def why_not(device: torch.device) -> str:
    """Why Liger cannot be used on ``device``; empty if it can."""
    if device.type != "cuda":  # its Triton kernels; ROCm is "cuda" to torch
        return f"Liger's kernels run on CUDA, the model computes on {device.type}"
    if find_spec("liger_kernel") is None:
        return "liger_kernel is not installed (pip install liger-kernel)"
    return ""


def linear_cross_entropy_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """As the function of that name beside this file, by Liger's kernels; gradients summed in float32.

    Raises:
        ValueError: For a scale together with a bias, which Liger has no way to express.
    """
    kernels: Any = import_module("liger_kernel.transformers")
    if scale != 1:
        if bias is not None:
            raise ValueError("Liger's kernels know no logit scale, and beside a bias nothing replaces it")
        hidden = hidden * scale
    loss = kernels.LigerFusedLinearCrossEntropyLoss(
        reduction="sum", softcap=softcap, accum_dtype=torch.float32
    )
    total: torch.Tensor = loss(weight, hidden.flatten(0, -2), labels.flatten(), bias)
    return total.float() if total.dtype != torch.float64 else total

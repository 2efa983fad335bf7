"""Liger's fused linear cross entropy, where its kernels are installed (CUDA only)."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


def why_not(device: torch.device) -> str:
    """Why Liger cannot be used on ``device``; empty if it can."""
    if device.type != "cuda":  # the type that Liger's Triton kernels need; torch calls ROCm devices so too
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
    """``linear_cross_entropy.linear_cross_entropy_sum`` by Liger's kernels; gradients are summed in float32.

    Raises:
        ValueError: If a scale is given together with a bias, which Liger cannot express.
    """
    kernels: Any = import_module("liger_kernel.transformers")
    if scale != 1:
        if bias is not None:
            raise ValueError(
                "Liger's kernels know no logit scale, which beside a bias cannot be "
                "multiplied into the hidden states; use impl='chunked'"
            )
        hidden = hidden * scale
    loss = kernels.LigerFusedLinearCrossEntropyLoss(
        reduction="sum", softcap=softcap, accum_dtype=torch.float32
    )
    total: torch.Tensor = loss(weight, hidden.flatten(0, -2), labels.flatten(), bias)
    return total.float() if total.dtype != torch.float64 else total

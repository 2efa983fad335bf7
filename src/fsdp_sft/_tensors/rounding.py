"""Tolerance for logits that would be equal in exact arithmetic."""

import torch
from torch import nn

from fsdp_sft._compat.fsdp import compute_dtypes

# Relative to the size of the logits. Rounding errors grow with the square root of the depth: with three
# random blocks logits differ by 2 epsilons in bfloat16 (1.4e-2), with 80 blocks they would by 10.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_TF32_TOLERANCE = 1e-2


def logits_tolerance(model: nn.Module, device: torch.device) -> float:
    """The tolerance for the dtypes in which a model computes on ``device``, relative to the logits' size."""
    dtypes = compute_dtypes(model)
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    known = [TOLERANCES[dtype] for dtype in dtypes if dtype in TOLERANCES]
    tolerance = max(known, default=TOLERANCES[torch.bfloat16])
    # This setting makes cuBLAS compute float32 products in TF32. Other devices stay with float32.
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        tolerance = max(tolerance, _TF32_TOLERANCE)
    return tolerance

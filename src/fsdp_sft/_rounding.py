"""How far logits may differ that would be equal without rounding."""

import torch
from torch import nn

from fsdp_sft._compat import compute_dtypes

# Relative to the logits' own size. Rounding grows with the root of the depth: three random blocks differ by 2
# epsilons in bfloat16 (1.4e-2), 80 blocks would by 10.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_TF32_TOLERANCE = 1e-2


def logits_tolerance(model: nn.Module, device: torch.device) -> float:
    """For the dtypes that a model computes in on ``device``."""
    dtypes = compute_dtypes(model)
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    tolerance = max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    tolerance = tolerance or TOLERANCES[torch.bfloat16]
    # A setting of cuBLAS: TF32 in float32 products. Other devices compute them in float32 or ignore it.
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        tolerance = max(tolerance, _TF32_TOLERANCE)
    return tolerance

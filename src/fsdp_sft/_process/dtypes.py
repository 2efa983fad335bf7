"""Arguments that are dtypes."""

import torch


def check_dtypes(**given: torch.dtype | None) -> None:
    """Raise for an argument that is no floating-point dtype, such as the name of one; None passes.

    Raises:
        ValueError: With the argument's name and, for a name of a dtype, the dtype itself.
    """
    for name, dtype in given.items():
        if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            continue
        meant = getattr(torch, str(dtype).removeprefix("torch."), None) if isinstance(dtype, str) else None
        like = meant if isinstance(meant, torch.dtype) else torch.bfloat16
        raise ValueError(f"{name} must be a floating-point torch.dtype such as {like}, got {dtype!r}")

"""Packed weights of a checkpoint whose config does not say that it is quantised: never taken as values."""

from collections.abc import Mapping

import torch

from fsdp_sft._quantised.settings import IN_16_BITS
from fsdp_sft.errors import CheckpointFormatError, abridged

_PACKED = (torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether weights of that dtype need scales that are stored beside them."""
    return dtype.itemsize == 1 or not dtype.is_floating_point


def refuse_packed(missing: list[str], left_over: Mapping[str, torch.dtype]) -> None:
    """Refuse a checkpoint whose missing values are stored packed, under names of a quantised format.

    Args:
        missing: Names of the model's tensors that the checkpoint lacks.
        left_over: Dtypes of the checkpoint's tensors that the model lacks, by name.

    Raises:
        CheckpointFormatError: If the module of a missing value, or one within it, has packed values instead.
    """
    packed = sorted(name for name, dtype in left_over.items() if dtype in _PACKED)
    for name in missing:
        module = name.rpartition(".")[0]
        beside = [key for key in packed if module and key.startswith(f"{module}.")]
        if beside:
            raise CheckpointFormatError(
                f"the checkpoint has no values for {name!r}, but packed ones ({abridged(beside)}): it is "
                f"quantised, and its config does not say how: {IN_16_BITS}"
            )

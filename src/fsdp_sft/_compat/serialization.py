"""Where tensors lie in a file of ``torch.save``."""

from typing import IO, Any

import torch


def load_without_memory(file: IO[bytes]) -> Any:
    """What a file of ``torch.save`` holds, its tensors without memory; nothing but plain data is made."""
    return torch.load(file, map_location="meta", weights_only=True, mmap=False)


def first_byte(tensor: torch.Tensor) -> int:
    """Byte of the file at which the storage of such a tensor begins.

    ``_checkpoint_offset``: ``torch.load`` onto the meta device says nowhere else where it found it.
    """
    return tensor.untyped_storage()._checkpoint_offset or 0

"""What a position is to predict: its label, the next one after the shift, or nothing."""

import torch

IGNORE_INDEX = -100
"""The label of a position that is not trained; the default of `torch.nn.functional.cross_entropy`."""


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """The target of each position, ``(B, S)``: the next label; the last position has none."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)

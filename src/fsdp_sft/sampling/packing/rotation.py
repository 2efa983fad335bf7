"""Compare rotary embeddings of a pack with those of its rows alone: do they depend on the longest row?"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.twin import rotations_by_length


def rope_depends_on_length(model: nn.Module) -> bool:
    """Whether rotary embeddings change with the longest row of a batch (dynamic NTK, LongRoPE)."""
    return bool(rotations_by_length(model))


class Rotations:
    """Outputs of a model's rotary embeddings in each forward since the last ``take``.

    They show a difference that rounding would hide in the logits: equal frequencies give equal numbers in
    every dtype.
    """

    def __init__(self) -> None:
        self._calls: list[list[torch.Tensor]] = []

    @contextmanager
    def recorded(self, model: nn.Module) -> Iterator[None]:
        """Record while the context lasts."""
        rotary = [m for m in model.modules() if hasattr(m, "inv_freq") or hasattr(m, "rope_type")]
        with ExitStack() as hooks:
            hooks.enter_context(model.register_forward_pre_hook(lambda *_: self._calls.append([])))
            for module in rotary:
                hooks.enter_context(module.register_forward_hook(self._record))
            yield

    def take(self) -> list[list[torch.Tensor]]:
        """Outputs of each forward, tensors ``(B, S, ...)``; this empties the record."""
        calls, self._calls = self._calls, []
        return calls

    def _record(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Record a copy of a rotary embedding's output."""
        parts = output if isinstance(output, (tuple, list)) else [output]
        for part in parts:
            if isinstance(part, torch.Tensor) and self._calls:
                self._calls[-1].append(
                    torch.view_as_real(part) if part.is_complex() else part.detach().clone()
                )


def largest_difference(pack: list[torch.Tensor], rows: list[list[torch.Tensor]], width: int) -> float:
    """Largest difference between the rotations of a pack and those of its rows.

    Args:
        pack: Tensors that one forward of the pack recorded.
        rows: Tensors that one forward of each row alone recorded.
        width: Tokens of the pack.
    """
    if any(len(row) != len(pack) for row in rows):
        return 0.0
    worst = 0.0
    for whole, *parts in zip(pack, *rows, strict=True):
        dim = next((d for d, size in enumerate(whole.shape) if size == width), None)
        if dim is not None:
            worst = max(worst, float((whole.float() - torch.cat(parts, dim).float()).abs().max()))
    return worst

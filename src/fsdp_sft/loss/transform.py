"""Scale and soft cap that a model applies to its head's output, and the numbers that they may come from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.twin import text_config
from fsdp_sft._model.wrappers import base_of, unwrapped


@dataclass(frozen=True)
class Transform:
    """The function that a model applies to its head's output: ``cap(scale * logits)``.

    Attributes:
        scale: Factor of the logits.
        softcap: Bound of ``cap(x) = softcap * tanh(x / softcap)``; None for no cap.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __str__(self) -> str:
        scaled = "" if self.scale == 1 else f"logits times {self.scale:g}"
        capped = "" if self.softcap is None else f"logits capped at {self.softcap:g}"
        return ", ".join(filter(None, (scaled, capped))) or "logits as they are"

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's logits from its head's output, of any shape."""
        scaled = logits * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)

    def error(self, raw: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Largest difference between ``logits`` and transformed ``raw``, relative to the largest logit."""
        raw, logits = wide(raw), wide(logits)
        return (self(raw) - logits).abs().max() / logits.abs().max()


def tolerance(raw: torch.Tensor, logits: torch.Tensor) -> float:
    """Largest ``Transform.error`` that rounding can explain."""
    return 16 * max(torch.finfo(raw.dtype).eps, torch.finfo(logits.dtype).eps)


def numbers_of(model: nn.Module) -> Iterator[tuple[Any, str, float]]:
    """(holder, name, value) of the numbers of a model, its config, and the configs inside that.

    Some models read their config in each forward, others keep a copy as an attribute; both may change.
    """
    inner: Any = base_of(unwrapped(model))
    config: Any = getattr(inner, "config", None)
    inside = [value for value in getattr(config, "__dict__", {}).values() if hasattr(value, "to_dict")]
    holders = {id(one): one for one in (inner, config, text_config(inner), *inside)}
    for holder in holders.values():
        for name, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield holder, name, float(value)


def candidates(model: nn.Module) -> list[Transform]:
    """Every combination of a scale and a soft cap that the model's numbers suggest, the identity first."""
    scales: dict[float, None] = {1.0: None}  # dicts keep the order
    softcaps: dict[float | None, None] = {None: None}
    for _, name, value in numbers_of(model):
        if value > 0 and _may_scale(name):
            scales.update({value: None, 1 / value: None})
        if value > 0 and _may_cap(name):
            softcaps[value] = None
    return [Transform(scale, softcap) for scale in scales for softcap in softcaps]


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in float32, or in float64 if it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _may_scale(name: str) -> bool:
    """Whether a number of this name may scale logits."""
    return any(word in name for word in ("logit", "scal", "multiplier"))


def _may_cap(name: str) -> bool:
    """Whether a number of this name may cap logits."""
    return "cap" in name

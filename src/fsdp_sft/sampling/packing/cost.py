"""The cost of a pack: of its tokens, and of attention within each of its rows."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fsdp_sft.metrics import model_flops_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Longer than every window and chunk of attention: beyond it only full attention costs more per token.
_LONG = 1 << 22


@dataclass(frozen=True)
class RowCost:
    """The cost of a row: ``per_token * tokens + per_square * tokens ** 2``; a pack costs the sum of its rows.

    Attributes:
        per_token: Cost of matrix products, and of attention whose window is shorter than the row.
        per_square: Cost of attention over the whole row.
    """

    per_token: float
    per_square: float

    @classmethod
    def check(cls, cost: Any) -> "RowCost":
        """The cost with these two coefficients.

        Raises:
            TypeError: If it is not two numbers.
            ValueError: If a number is negative or not finite, or both are 0.
        """
        parts = cost if isinstance(cost, (tuple, list)) else ()
        numbers = [part for part in parts if isinstance(part, (int, float)) and not isinstance(part, bool)]
        if len(parts) != 2 or len(numbers) != 2:
            raise TypeError(f"cost must be two numbers, such as attention_cost(config), got {cost!r}")
        if not all(math.isfinite(part) and part >= 0 for part in cost) or not any(cost):
            raise ValueError(
                f"the numbers of cost must be finite, not negative, and not both 0, got {cost!r}"
            )
        return cls(float(cost[0]), float(cost[1]))

    def of(self, tokens: int) -> float:
        """Cost of a row of ``tokens`` tokens."""
        return self.per_token * tokens + self.per_square * tokens * tokens


def attention_cost(
    config: "PreTrainedConfig", *, attention: Literal["varlen", "full"] = "varlen"
) -> tuple[float, float]:
    """Coefficients ``(a, b)`` of a pack's cost, ``a * tokens + b * sum(length ** 2)``, for ``PackedSampler``.

    They are training FLOPs, counted as by ``model_flops_per_token`` except that a token attends only to those
    before it, half of its row on average. Layers with a sliding window or chunks count as if every row were
    longer than the window.

    Args:
        config: A transformers config of a decoder-only model.
        attention: Attention scores that are computed. ``"varlen"``: those within each row, as with
            ``use_varlen_attention`` or flash attention. ``"full"``: those of the whole pack, most of them
            masked, as with transformers' "sdpa"; packs of equally many tokens then cost the same, and ``b``
            is 0.

    Returns:
        (FLOPs per token, FLOPs per squared token).

    Raises:
        ValueError: For a family whose FLOPs ``model_flops_per_token`` does not count.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=256, intermediate_size=688)
        >>> a, b = fs.attention_cost(config)
        >>> b
        3072.0
        >>> sampler = fs.PackedSampler([4096] + [64] * 99, max_length=4096, cost=(a, b))
    """
    if attention not in ("varlen", "full"):
        raise ValueError(f"attention must be 'varlen' or 'full', got {attention!r}")
    try:
        near, far = (model_flops_per_token(config, length) for length in (_LONG, 2 * _LONG))
    except ValueError as error:
        raise ValueError(
            f"{error}; or give cost=(6 * parameters a token passes through, 6 * heads * head_dim * layers)"
        ) from error
    growth = (far - near) / _LONG
    per_token = near - growth * _LONG
    return (per_token, growth / 2 if attention == "varlen" else 0.0)

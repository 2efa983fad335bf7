"""The blocks that a ratio selects, in exact arithmetic."""

import re
from fractions import Fraction
from typing import Literal

Ratio = float | str | Fraction
Placement = Literal["even", "prefix"]

_PLACEMENTS = ("even", "prefix")
_RATIO_TEXT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(?:\s*/\s*(\d{1,9}(?:\.\d{1,9})?))?", re.ASCII)


def parse_ratio(ratio: Ratio) -> Fraction:
    """The exact ratio that a number or a text such as ``"1/3"`` stands for.

    Args:
        ratio: Number or text. A float stands for the nearest fraction with a denominator up to 1000: stored
            in binary, 0.7 is a little less than 7/10 and would select 31 of 45 blocks instead of 32.

    Raises:
        TypeError: If it is neither a number nor a text.
        ValueError: If it cannot be read or lies outside [0, 1].
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float, str, Fraction)):
        raise TypeError(f"ratio must be a number in [0, 1] or a text such as '1/3', got {ratio!r}")
    exact: float | Fraction
    if isinstance(ratio, str):
        # Fraction() alone would also read '1_0' and '1e5', and compute powers of ten without bound.
        found = _RATIO_TEXT.fullmatch(ratio.strip())
        if found is None or not float(found[2] or 1):
            raise ValueError(f"ratio must be a number in [0, 1] or a text such as '1/3', got {ratio[:40]!r}")
        exact = Fraction(found[1]) / Fraction(found[2] or 1)
    elif isinstance(ratio, float) and 0 <= ratio <= 1:
        exact = Fraction(ratio).limit_denominator(1000)
    else:
        exact = ratio
    if not 0 <= exact <= 1:
        raise ValueError(f"ratio must be in [0, 1], got {ratio}; 0 checkpoints no block, and 1 every block")
    return Fraction(exact)


def select_block_indices(num_blocks: int, ratio: Ratio, *, placement: Placement = "even") -> list[int]:
    """Indices of the blocks that a ratio selects for checkpointing.

    ``"even"`` selects block ``i`` if ``floor((i + 1) * r + 1/2) > floor(i * r + 1/2)``, in exact arithmetic.
    That spreads the selected blocks evenly and selects ``floor(num_blocks * r + 1/2)`` of them. ``"prefix"``
    selects as many from the front. It lowers the peak further, because the first blocks' activations are held
    longest.

    Args:
        num_blocks: Number of blocks in the model.
        ratio: Fraction of blocks in [0, 1]: a number or a text such as ``"1/3"``.
        placement: ``"even"`` or ``"prefix"``.

    Returns:
        Indices from 0, ascending.

    Raises:
        TypeError: If ``ratio`` is neither a number nor a text.
        ValueError: If an argument is out of range.

    Example:
        >>> fs.select_block_indices(9, "1/3")
        [1, 4, 7]
        >>> fs.select_block_indices(9, "1/3", placement="prefix")
        [0, 1, 2]
    """
    if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 0:
        raise ValueError(f"num_blocks must be a non-negative integer, got {num_blocks!r}")
    if placement not in _PLACEMENTS:
        raise ValueError(f"placement must be one of {_PLACEMENTS}, got {placement!r}")
    numerator, denominator = parse_ratio(ratio).as_integer_ratio()

    def taken_before(i: int) -> int:  # floor(i * ratio + 1/2) in integers
        return (2 * i * numerator + denominator) // (2 * denominator)

    if placement == "prefix":
        return list(range(taken_before(num_blocks)))
    return [i for i in range(num_blocks) if taken_before(i + 1) > taken_before(i)]

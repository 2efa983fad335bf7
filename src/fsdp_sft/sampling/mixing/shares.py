"""Rows of each data set in an epoch, from weights, counts or a temperature."""

from collections.abc import Sequence
from typing import Any

from fsdp_sft.sampling.packing.bins import as_ints, check_count


def rows_of_each(
    sizes: list[int],
    weights: Sequence[float] | None,
    counts: Sequence[int] | None,
    temperature: float | None,
    epoch_rows: int | None,
) -> list[int]:
    """Number of rows of each data set in an epoch; the arguments are those of ``MixedSampler``.

    Raises:
        TypeError: If a weight, a count or the temperature is no number.
        ValueError: If an argument is out of range or contradicts another.
    """
    if not sizes or min(sizes) < 0:
        raise ValueError(f"datasets must be one or more data sets, or their numbers of rows, got {sizes}")
    given = [
        name
        for name, value in (("weights", weights), ("counts", counts), ("temperature", temperature))
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"give one of weights, counts and temperature, got {' and '.join(given)}")
    if epoch_rows is not None and (counts is not None or not given):
        raise ValueError(
            "epoch_rows goes with weights or temperature; counts say by themselves how many rows"
        )
    if counts is not None:
        wanted = as_ints("counts", counts)
    elif not given:
        wanted = list(sizes)
    else:
        if weights is not None:
            shares = [as_share("weights", weight) for weight in weights]
        else:
            power = as_share("temperature", temperature)
            if power < 1:
                raise ValueError(f"temperature must be at least 1, got {temperature!r}")
            shares = [float(size) ** (1 / power) if size else 0.0 for size in sizes]
        wanted = _apportioned(
            shares, check_count("epoch_rows", sum(sizes) if epoch_rows is None else epoch_rows)
        )
    if len(wanted) != len(sizes) or min(wanted) < 0 or not any(wanted):
        raise ValueError(
            f"there are {len(sizes)} data sets, and an epoch must have a number of rows for each of them, "
            f"not negative and not all 0; got {wanted}"
        )
    empty = [
        number for number, (size, want) in enumerate(zip(sizes, wanted, strict=True)) if want and not size
    ]
    if empty:
        raise ValueError(f"data set {empty[0]} has no rows, and {wanted[empty[0]]} are asked for in an epoch")
    return wanted


def as_share(name: str, value: Any) -> float:
    """``value`` as a float, or an error if it is no number, not finite, or negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {'a number' if name == 'temperature' else 'numbers'}, got {value!r}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be finite and not negative, got {value!r}")
    return float(value)


def _apportioned(shares: list[float], total: int) -> list[int]:
    """Divide ``total`` into whole parts in these proportions, by the method of largest remainders.

    Each part is the exact one, rounded down or up.
    """
    if not any(shares):
        raise ValueError(f"one of the weights must be above 0, got {shares}")
    exact = [share * total / sum(shares) for share in shares]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda number: (parts[number] - exact[number], number))
    for number in by_remainder[: total - sum(parts)]:
        parts[number] += 1
    return parts

"""The longest row that fits into memory, by the number of ranks that share it."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from fsdp_sft.errors import NoPlanError
from fsdp_sft.planner.budget import budget_of
from fsdp_sft.planner.estimate import MemoryEstimate, check_options, estimate
from fsdp_sft.planner.groups import with_leanest_update
from fsdp_sft.planner.model import as_config
from fsdp_sft.planner.run import RunKeywords
from fsdp_sft.planner.search import group_sizes, least_checkpointed, smallest_num_gpus
from fsdp_sft.planner.setup import Setup, check_integer
from fsdp_sft.sac import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LONGEST = 1 << 24  # tokens; longer rows are not looked for
_FIRST = 64  # the length that is tried first, in units of multiple_of
_SECANTS = 8  # tries by secants, after which bisection takes over


@dataclass(frozen=True)
class LongestRow:
    """The longest row that fits where a given number of ranks share it.

    Attributes:
        cp: Number of ranks that share each row.
        seq_length: Tokens of the row.
        sac_ratio: Fraction of checkpointed blocks: the smallest of a fixed list with which the row fits.
        sac_placement: Placement of the checkpointed blocks: ``"even"`` or ``"prefix"``.
        sac_offload: Whether what checkpointed blocks keep is offloaded to the host.
        estimate: Memory per GPU.
        optimizer: The optimizer, by the planner's name for it.
    """

    cp: int
    seq_length: int
    sac_ratio: Fraction
    sac_placement: Placement
    sac_offload: bool
    estimate: MemoryEstimate
    optimizer: str = "adamw"

    @property
    def peak_bytes(self) -> int:
        """Predicted peak per GPU, in bytes."""
        return self.estimate.peak_bytes

    @property
    def largest_part(self) -> str:
        """The kind of memory that is largest at the peak."""
        return max(self.estimate.breakdown, key=lambda part: self.estimate.breakdown[part])


def longest_rows(
    config: "PreTrainedConfig | str | os.PathLike[str]",
    *,
    num_gpus: int,
    gpu_memory_bytes: int | None = None,
    multiple_of: int = 1024,
    **estimate_options: Unpack[RunKeywords],
) -> list[LongestRow]:
    """Find the longest row that fits into memory, for each number of ranks that could share it.

    A micro-batch is one row, and as many blocks are checkpointed as it needs. ``sac_offload=True`` offloads
    what these blocks keep. AdamW is fused if nothing fits otherwise and no ``optimizer`` is given.

    Args:
        config: The config, as for ``estimate_memory``.
        num_gpus: Number of ranks.
        gpu_memory_bytes: Memory of one device, as for ``plan_run``.
        multiple_of: Lengths are multiples of this number of tokens.
        **estimate_options: Further fields of ``Run``. Where ``cp`` or ``sac_ratio`` is given,
            only that value is tried. With ``attention_mask=True``, the default, attention gets a mask of
            S x S; packs do not have one where ``use_varlen_attention`` runs.

    Returns:
        One result for each number of ranks with which ``multiple_of`` tokens fit, ascending; at least one.

    Raises:
        NoPlanError: If not even ``multiple_of`` tokens fit, whatever the number of ranks.
        TypeError: For an option that ``Run`` does not have, or ``seq_length``.
        ValueError: For an argument out of range.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(
        ...     hidden_size=256,
        ...     intermediate_size=640,
        ...     num_hidden_layers=4,
        ...     num_attention_heads=8,
        ... )
        >>> rows = fs.longest_rows(
        ...     config, num_gpus=8, gpu_memory_bytes=2**31, attention_mask=False
        ... )
        >>> [row.cp for row in rows]
        [1, 2, 4, 8]
        >>> rows[-1].seq_length > 7 * rows[0].seq_length
        True
    """
    if "seq_length" in estimate_options:
        raise TypeError("longest_rows finds seq_length; estimate_memory says what one length takes")
    check_integer("multiple_of", multiple_of, 1)
    known = as_config(config)
    options = {"micro_batch_size": 1, **estimate_options}
    first = check_options(num_gpus=num_gpus, seq_length=multiple_of, **options)
    budget = budget_of(first.device, num_gpus, gpu_memory_bytes)
    found = list[LongestRow]()
    for cp in group_sizes(known, first, options):
        setup = replace(first, cp=cp)
        expected = found[-1].seq_length * cp // found[-1].cp if found else _FIRST * multiple_of
        length = _longest(_leanest_peak(known, setup, options), budget.usable_bytes, multiple_of, expected)
        if length:
            found.append(_row(known, replace(setup, seq_length=length), options, budget.usable_bytes))
    leanest, given = with_leanest_update(first, options), dict[str, Any](estimate_options)
    sizes: dict[str, Any] = {"gpu_memory_bytes": gpu_memory_bytes}
    if not found and leanest != first:
        given["optimizer"] = leanest.optimizer
        return longest_rows(known, num_gpus=num_gpus, multiple_of=multiple_of, **sizes, **given)
    if not found:
        enough = smallest_num_gpus(known, seq_length=multiple_of, **sizes, **given)
        raise NoPlanError(
            f"not even {multiple_of} tokens fit on {num_gpus} GPUs, {budget}: "
            + (f"{enough} would hold them" if enough else "adapters (lora_rank, --lora) may fit")
        )
    return found


def peaks_by_length(
    config: Any,
    row: LongestRow,
    lengths: list[int],
    *,
    num_gpus: int,
    **estimate_options: Unpack[RunKeywords],
) -> list[int]:
    """Peak bytes per GPU for rows of other lengths, each with no block or every block checkpointed."""
    options = {"micro_batch_size": 1, **estimate_options, "cp": row.cp}
    setup = check_options(num_gpus=num_gpus, seq_length=row.seq_length, **options)
    peak = _leanest_peak(config, setup, options)
    return [peak(length) for length in lengths]


def _leanest_peak(config: Any, setup: Setup, options: dict[str, Any]) -> Callable[[int], int]:
    """Function from a length to the least peak, with no block or every block checkpointed."""
    given = "sac_ratio" in options or setup.sac_blocks is not None
    ratios = (setup.sac_ratio,) if given else (Fraction(0), Fraction(1))

    def peak(length: int) -> int:
        tried = (replace(setup, seq_length=length, sac_ratio=ratio) for ratio in ratios)
        return min(estimate(config, way).peak_bytes for way in tried)

    return peak


def _longest(peak: Callable[[int], int], budget: int, step: int, expected: int) -> int:
    """The longest multiple of ``step`` whose peak is within the budget; 0 if there is none.

    The peak is nearly linear in the length (curved with a mask), so secants find the answer in a few tries.
    """
    low, high = 1, _LONGEST // step
    at_low = peak(step)
    if at_low > budget:
        return 0
    tries, tried = 0, min(max(expected // step, 2), high)
    while low < high:
        found, tries = peak(tried * step), tries + 1
        slope = (found - at_low) / (tried - low)
        if found <= budget:
            low, at_low = tried, found
        else:
            high = tried - 1
        ahead = int((budget - at_low) / slope) if slope > 0 else high - low
        tried = min(max(low + ahead, low + 1), high) if tries < _SECANTS else (low + high + 1) // 2
    return low * step


def _row(config: Any, setup: Setup, options: dict[str, Any], budget: int) -> LongestRow:
    """The row of a setup, with as few checkpointed blocks as fit."""
    ways = least_checkpointed(config, setup, options, budget)
    way, memory = min(ways, key=lambda found: found[0].sac_ratio)
    return LongestRow(
        way.cp,
        way.seq_length,
        way.sac_ratio,
        way.sac_placement,
        way.sac_offload,
        estimate=memory,
        optimizer=way.optimizer,
    )

"""Exact context parallelism: each rank has a part of a row's tokens, and attention sees all of them."""

from fsdp_sft.attention.context_parallel.group import (
    SequenceGroup,
    WholeRows,
    part_of_rows,
    sequence_group_in,
)
from fsdp_sft.attention.context_parallel.use import (
    check_shareable,
    sequence_group_of,
    share_attention,
    use_context_parallel,
)

__all__ = [
    "SequenceGroup",
    "WholeRows",
    "check_shareable",
    "part_of_rows",
    "sequence_group_in",
    "sequence_group_of",
    "share_attention",
    "use_context_parallel",
]

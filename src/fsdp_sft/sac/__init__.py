"""Selective activation checkpointing: recompute chosen blocks, or chosen operations, in the backward."""

from fsdp_sft.sac.apply import (
    Placement as Placement,
    Ratio as Ratio,
    apply_sac as apply_sac,
    draws_random_numbers as draws_random_numbers,
    named_blocks as named_blocks,
    parse_ratio as parse_ratio,
    select_block_indices as select_block_indices,
)
from fsdp_sft.sac.attach import remove_sac as remove_sac
from fsdp_sft.sac.decisions import decides as decides, is_decision as is_decision
from fsdp_sft.sac.ops import refuse_inner_groups as refuse_inner_groups

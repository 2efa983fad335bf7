"""Selective activation checkpointing: recompute chosen blocks, or chosen operations, in the backward."""

from fsdp_sft.sac.apply import apply_op_sac as apply_op_sac
from fsdp_sft.sac.apply import apply_sac as apply_sac
from fsdp_sft.sac.apply import named_blocks as named_blocks
from fsdp_sft.sac.apply import remove_sac as remove_sac
from fsdp_sft.sac.away import host_bytes_for as host_bytes_for
from fsdp_sft.sac.budget import compile_under_budget as compile_under_budget
from fsdp_sft.sac.budget import compile_with_memory_budget as compile_with_memory_budget
from fsdp_sft.sac.decisions import decides as decides
from fsdp_sft.sac.decisions import is_decision as is_decision
from fsdp_sft.sac.noise import draws_random_numbers as draws_random_numbers
from fsdp_sft.sac.proof import check_now as check_now
from fsdp_sft.sac.ratio import Placement as Placement
from fsdp_sft.sac.ratio import Ratio as Ratio
from fsdp_sft.sac.ratio import parse_ratio as parse_ratio
from fsdp_sft.sac.ratio import select_block_indices as select_block_indices

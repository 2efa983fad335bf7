"""Memory per GPU from a config alone, and which way to run a training fits and is fastest."""

from fsdp_sft.errors import NoPlanError
from fsdp_sft.planner.estimate import MemoryEstimate, estimate_memory
from fsdp_sft.planner.longest import LongestRow, longest_rows
from fsdp_sft.planner.search import RunPlan, plan_run, smallest_num_gpus

__all__ = [
    "LongestRow",
    "MemoryEstimate",
    "NoPlanError",
    "RunPlan",
    "estimate_memory",
    "longest_rows",
    "plan_run",
    "smallest_num_gpus",
]

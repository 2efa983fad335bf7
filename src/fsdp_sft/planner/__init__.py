"""Memory per GPU from a model's config alone, and the fastest way to train that fits.

An estimate goes through these files, in this order: run.py describes the run; model.py builds the model on
the meta device and groups its parameters as FSDP2 does (parameters.py has the bytes of each group); trace.py
runs one block of each kind (ledger.py counts bytes alive, kernels.py stands in for fused kernels, experts and
other ranks, footprint.py sums up what a block keeps, also compiled); replay.py replays the allocations of a
step; estimate.py sums up, and says how much memory a device has for tensors. speed.py turns the same trace
into seconds. search.py makes many estimates, plan.py writes a plan as code, command.py shows plans and writes
one as a program.
"""

from fsdp_sft.errors import NoPlanError
from fsdp_sft.planner.estimate import MemoryEstimate, estimate_memory
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.search import RunPlan, plan_run

__all__ = [
    "MemoryEstimate",
    "NoPlanError",
    "Run",
    "RunPlan",
    "estimate_memory",
    "plan_run",
]

"""Memory per GPU from a model's config alone, and the fastest way to train that fits.

An estimate goes through these files, in this order: run.py describes the run, and setup.py validates it;
model.py builds the model on the meta device and groups its parameters as FSDP2 does (parameters.py; packed.py
says which are kept packed); trace.py runs one block of each kind (ledger.py counts bytes alive, kernels.py
stands in for fused kernels, experts.py for experts, sharing.py for ranks that share rows, fused.py for
``torch.compile``; footprint.py is what it reports); replay.py replays one step's allocations, sizes.py has
those of a gather and a reduction. speed.py turns the same trace into seconds. search.py
and advice.py make many estimates, budget.py says how much memory a device has for tensors, plan.py writes a
plan as code, picture.py and command.py show it.
"""

from fsdp_sft.errors import NoPlanError
from fsdp_sft.planner.estimate import MemoryEstimate, estimate_memory
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.search import RunPlan, plan_run, smallest_num_gpus

__all__ = [
    "MemoryEstimate",
    "NoPlanError",
    "Run",
    "RunPlan",
    "estimate_memory",
    "plan_run",
    "smallest_num_gpus",
]

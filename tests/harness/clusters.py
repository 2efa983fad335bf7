"""A job to be checked, without ranks."""

import torch

from fsdp_sft._ranks.launch import DistributedContext
from fsdp_sft.check import CheckedJob


def job_of(*hosts: str) -> CheckedJob:
    """Rank 0's view of a job whose ranks are on these hosts."""
    context = DistributedContext(0, 0, len(hosts), 2, torch.device("cpu"), "gloo", "torchrun")
    return CheckedJob(context, list(hosts))

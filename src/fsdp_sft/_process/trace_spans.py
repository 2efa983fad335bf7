"""The parts of an optimizer step, by the names that they have in profiler traces."""

from torch.profiler import record_function

PREFIX = "fsdp_sft."
DEVICE = "fsdp_sft.device"
"""Key of the rank's device type in a trace."""


def part(name: str) -> record_function:
    """Context that traces show as one span ``fsdp_sft.<name>``."""
    return record_function(PREFIX + name)

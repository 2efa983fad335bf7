"""The parts of an optimizer step, by the names that they have in profiler traces."""

from torch.profiler import record_function

PREFIX = "fsdp_sft."
DEVICE = "fsdp_sft.device"
"""Key under which a trace has the type of the rank's device."""


def part(name: str) -> record_function:
    """Context in which what runs is shown as one span ``fsdp_sft.<name>`` in traces."""
    return record_function(PREFIX + name)

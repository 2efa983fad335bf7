"""The parts of an optimizer step, by the names that they have in profiler traces."""

from torch.profiler import record_function


def part(name: str) -> record_function:
    """Context that traces show as one span ``fsdp_sft.<name>``."""
    return record_function(f"fsdp_sft.{name}")

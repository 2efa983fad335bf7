"""Functions on ranks that each have a simulated device, whatever the setting of the harness."""

import functools
from collections.abc import Callable
from typing import Any

from tests.harness.device import simulator_or_skip
from tests.harness.ranks import run_task
from tests.simulated.device import Simulated


def run_simulated(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    devices: int = 2,
    first_device: int = 0,
    copy_delay: float = 0.0,
    timeout: float = 120,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` on ranks with a simulated device each, and return what each returned.

    Skips the test where there is no compiler.

    Args:
        function: At the top of its module.
        world_size: Number of ranks.
        args: Its arguments.
        devices: That each rank sees.
        first_device: Index of rank 0's; the next rank has the next one.
        copy_delay: Seconds that each copy across the bus takes at least: makes races show.
        timeout: In seconds.
        fresh: Whether the ranks must not have run anything before, and run nothing afterwards.
        kwargs: Its keyword arguments.
    """
    simulator_or_skip()
    own = [Simulated(first_device + rank, devices, copy_delay) for rank in range(world_size)]
    return run_task(functools.partial(function, *args, **kwargs), own, timeout=timeout, fresh=fresh)

"""Report on all ranks which rank died, hangs or is out of step, instead of a silent time-out.

A rank's heartbeat (beat.py) travels through the c10d store (exchange.py). Rules decide from the beats what is
wrong (judge.py), a report says it in words (report.py), and a thread beside the training loop runs all this
(watch.py).
"""

from fsdp_sft.jobs.watchdog.watch import STALL_EXIT_CODE, Watchdog

__all__ = ["STALL_EXIT_CODE", "Watchdog"]

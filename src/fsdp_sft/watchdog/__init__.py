"""A rank that dies, hangs or falls out of step, named on all ranks instead of a silent time-out.

beat.py is what a rank says of itself, exchange.py carries beats through the c10d store, judge.py decides what
is wrong, report.py says it, watch.py is the loop's side of it.
"""

from fsdp_sft.watchdog.watch import STALL_EXIT_CODE, Watchdog

__all__ = ["STALL_EXIT_CODE", "Watchdog"]

"""Gives a process that a launcher starts its simulated device; Python imports this at its start.

``tests/harness/launches.py`` puts this folder on the path of the programs that it starts, with the number of
devices in ``FSDP_SFT_LAUNCHED_DEVICES``. Launchers themselves, which have no local rank, stay as they are.
"""

import atexit
import os
import sys


def _check() -> None:
    try:
        own.check()
    except AssertionError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)  # an exit code cannot be changed here otherwise


found = [os.environ[name] for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in os.environ]
if found and "FSDP_SFT_LAUNCHED_DEVICES" in os.environ:
    from tests.harness.device import simulated

    own = simulated(int(found[0]), int(os.environ["FSDP_SFT_LAUNCHED_DEVICES"]))
    own.become()
    atexit.register(_check)

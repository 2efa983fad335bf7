"""The example with a pause in each step, so that what strikes after some seconds strikes in mid-training.

Nothing else differs. PACE_SECONDS in the environment says how long the pauses are.
"""

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import fsdp_sft as fs

EXAMPLES = Path(__file__).parents[2] / "examples"  # a script: the tests are not on its path
_train_step = fs.train_step


def _paced_step(*args: Any, **kwargs: Any) -> fs.StepResult:
    time.sleep(float(os.environ.get("PACE_SECONDS", "0.2")))
    return _train_step(*args, **kwargs)


if __name__ == "__main__":
    fs.train_step = _paced_step
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "minimal_sft.py"), run_name="__main__")

"""A module of this library that runs in a process of its own."""

import os
import subprocess
import sys
from typing import Any


def start_module(name: str, **files: Any) -> "subprocess.Popen[bytes]":
    """Start ``python -P -m name`` without accelerators.

    Args:
        name: The module.
        files: ``stdin``, ``stdout`` and ``stderr``, as ``subprocess.Popen`` takes them.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    # -P: otherwise the current folder, which may be a stranger's, would come first on the path.
    return subprocess.Popen([sys.executable, "-P", "-m", name], env=environment, **files)

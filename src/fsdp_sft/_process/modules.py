"""A module of this library that runs in a process of its own, and talks through pipes."""

import os
import subprocess
import sys
from typing import IO, Any


def start_module(name: str, errors: "IO[bytes] | None" = None) -> "subprocess.Popen[bytes]":
    """Start ``python -P -m name`` without accelerators, with pipes to its standard input and output.

    Args:
        name: The module.
        errors: File for its standard error; None shares this process's.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    # -P: otherwise the current folder, which may be a stranger's, would come first on the path.
    command, pipe = [sys.executable, "-P", "-m", name], subprocess.PIPE
    options: dict[str, Any] = {"env": environment, "stdin": pipe, "stdout": pipe, "stderr": errors}
    return subprocess.Popen(command, **options)

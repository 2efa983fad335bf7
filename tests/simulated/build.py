"""Compile the simulated accelerator, once for each version of torch, Python and its own sources.

The result is the package ``simdev`` in a folder of the user's cache: put that folder on ``sys.path`` and
import it. Processes that want it at the same time wait for the one that compiles.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "source"


class NoCompilerError(RuntimeError):
    """There is no C++ compiler on this machine."""


@functools.cache
def folder() -> Path:
    """The folder that has the package ``simdev``; compiled now (20 s) if it is not there yet.

    Raises:
        NoCompilerError: If it would have to be compiled and cannot be.
        RuntimeError: If the compiler fails; with what it printed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp-sft-simulated"
    target = cache / _digest()
    if target.exists():
        return target
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NoCompilerError("the simulated accelerator is C++, and neither g++ nor c++ is on the PATH")
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock, tempfile.TemporaryDirectory(dir=cache) as temporary:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, Path(temporary))
            os.rename(temporary, target)
    return target


def _digest() -> str:
    """Of everything that the compiled module depends on."""
    hashed = hashlib.sha256(f"{torch.__version__} {torch.__file__} {sys.version}".encode())
    for path in (*sorted(SOURCE.iterdir()), Path(__file__)):
        if path.is_file():
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


def _compile(compiler: str, folder: Path) -> None:
    package = folder / "simdev"
    package.mkdir()
    shutil.copy(SOURCE / "simdev.py", package / "__init__.py")
    root = Path(torch.__file__).parent
    flags = [
        *("-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-DTORCH_EXTENSION_NAME=_C"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{root / part}" for part in ("include", "include/torch/csrc/api/include")),
        f"-I{sysconfig.get_paths()['include']}",
    ]
    # Parsing torch's headers takes most of the time, so all sources are one translation unit.
    everything = folder / "everything.cpp"
    sources = sorted(SOURCE.glob("*.cpp"))
    everything.write_text("".join(f'#include "{source.resolve()}"\n' for source in sources))
    module = package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{root / 'lib'}"]
    command = [
        compiler,
        *flags,
        str(everything),
        "-shared",
        f"-L{root / 'lib'}",
        *libraries,
        "-o",
        str(module),
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{command!r} failed:\n{done.stderr[-4000:]}")
    everything.unlink()


if __name__ == "__main__":
    print(folder())

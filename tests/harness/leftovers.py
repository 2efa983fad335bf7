"""What a test has left behind in its process: patched names, environment, modes, threads, compiled code.

A rank that serves test after test compares what it finds before and after each. One in which something has
changed is not used again, so a test may patch what it likes.
"""

import logging
import os
import random
import signal
import sys
import threading
import types
import warnings
from typing import Any

import torch

_MODULES = (
    *("builtins", "os", "pathlib", "random", "shutil", "socket", "tempfile", "time"),
    *("huggingface_hub.constants", "huggingface_hub.file_download"),
    *("torch", "torch.accelerator", "torch.cuda", "torch.distributed", "torch.nn.functional", "torch.random"),
    *("torch.distributed.distributed_c10d", "torch.nn.utils", "torch.optim.optimizer", "torch.utils.data"),
    *("transformers.conversion_mapping", "transformers.core_model_loading", "transformers.modeling_utils"),
    *("transformers.dynamic_module_utils", "transformers.integrations.sdpa_attention"),
    *("transformers.masking_utils", "transformers.utils.hub"),
)
_PACKAGES = ("fsdp_sft.", "tests.")
# What the library and torch keep for the next call, in every process that goes on.
_KEPT = {
    "tempfile._name_sequence",
    "tempfile.tempdir",
    "transformers.conversion_mapping._checkpoint_conversion_mapping_cache",
    "fsdp_sft._agree._groups",
    "fsdp_sft._agree._timeout",
    "fsdp_sft.dcp_io.checkpoint._snapshot",
    "torch.distributed.distributed_c10d._backend",
    "torch.distributed.distributed_c10d._default_pg_init_method",
    "transformers.modeling_utils._CAN_RECORD_REGISTRY",
}
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Set by pytest for each phase of a test, and by torch when it first compiles.
_NOBODYS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


def settings() -> dict[str, Any]:
    """What holds for the whole process, by name."""
    return {
        "environment": {name: os.environ[name] for name in os.environ.keys() - _NOBODYS},
        "folder": os.getcwd(),
        "threads": sorted(t.name for t in threading.enumerate() if "tqdm" not in t.name),
        "signals": [signal.getsignal(number) for number in _SIGNALS],
        "logging": logging.root.manager.disable,
        "warnings": [str(entry) for entry in warnings.filters],
        "sys.path": list(sys.path),
        "dtype": torch.get_default_dtype(),
        "torch threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
    }


def state() -> dict[str, Any]:
    """Everything that is compared, by name."""
    found = {**settings(), "compiled": _compiled_frames()}
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and (name in _MODULES or name.startswith(_PACKAGES)):
            found.update(_names_of(name, module))
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not as it was; what is new counts as an import."""
    return [name for name, value in before.items() if name not in _KEPT and after.get(name) != value]


def _names_of(name: str, module: types.ModuleType) -> dict[str, Any]:
    found = {}
    for key, value in list(vars(module).items()):
        # By type(): to ask torch's deprecated objects for their class makes them warn.
        if key.startswith("__") or issubclass(type(value), (types.ModuleType, random.Random)):
            continue
        found[f"{name}.{key}"] = _identity(value)
        if issubclass(type(value), type) and (value.__module__ == name or name == "socket"):
            found[f"{name}.{key}()"] = {k: id(v) for k, v in list(vars(value).items()) if k[:2] != "__"}
    return found


def _identity(value: Any) -> Any:
    if issubclass(type(value), dict):
        return id(value), [(key, id(member)) for key, member in list(value.items())]
    if issubclass(type(value), (list, set)):
        return id(value), len(value)
    return id(value)


def _compiled_frames() -> int:
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["frames"]["total"]

"""What a test has left behind in its process: patched names, environment, modes, threads, compiled code.

A rank that serves test after test compares what it finds before and after each, and puts back what can be put
back by assigning it: so a test may patch what it likes. A rank in which something is still changed afterwards
is not used again.
"""

import logging
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

_MODULES = {
    *("builtins", "os", "pathlib", "random", "shutil", "socket", "tempfile", "time"),
    *("huggingface_hub.constants", "huggingface_hub.file_download"),
    *("torch", "torch.accelerator", "torch.cuda", "torch.distributed", "torch.nn.functional", "torch.random"),
    *("torch.distributed.distributed_c10d", "torch.nn.utils", "torch.optim.optimizer", "torch.utils.data"),
    *("transformers.conversion_mapping", "transformers.core_model_loading", "transformers.modeling_utils"),
    *("transformers.dynamic_module_utils", "transformers.integrations.sdpa_attention"),
    *("transformers.masking_utils", "transformers.utils.hub", "simdev"),
}
_PACKAGES = ("fsdp_sft.", "tests.")
# What the library and torch keep for the next call, in every process that goes on.
_GROUPS = "torch.distributed.distributed_c10d._"  # a rank stays in its process group
_KEPT = {
    "tempfile._name_sequence",
    "tempfile.tempdir",
    "transformers.conversion_mapping._checkpoint_conversion_mapping_cache",
    "fsdp_sft._ranks.agree._groups",
    "fsdp_sft._ranks.agree._timeout",
    "fsdp_sft.dcp_io.saving._buffers",
    "fsdp_sft.dcp_io.retention._own_steps",
    "huggingface_hub.file_download._are_symlinks_supported_in_dir",
    "transformers.modeling_utils._CAN_RECORD_REGISTRY",
    *(_GROUPS + name for name in ("backend", "default_pg_init_method", "group_count", "tags_to_pg")),
    *(_GROUPS + "pg_" + name for name in ("map", "names", "group_ranks", "backend_config", "to_tag")),
}
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Set by pytest for each phase of a test, and by torch when it first compiles.
_NOBODYS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"}


# What tests register for a class of models; put back together, by copies.
_REGISTRY = "transformers.conversion_mapping.USER_REGISTERED_MAPPINGS"
_REGISTERED = "transformers.conversion_mapping._checkpoint_conversion_mapping_cache"


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


class State:
    """Everything that is compared, and what is needed to put it back.

    Args:
        before: An earlier one: modules in which nothing has changed since are not looked into again.

    Attributes:
        settings: What holds for the whole process, by name.
        modules: What each module has.
    """

    def __init__(self, before: "State | None" = None) -> None:
        dynamo: Any = sys.modules.get("torch._dynamo.utils")
        frames = 0 if dynamo is None else dynamo.counters["frames"]["total"]
        self.settings = {**settings(), "compiled": frames}
        known = {} if before is None else before.modules
        self.modules: dict[str, _Names] = {}
        for name, module in list(sys.modules.items()):
            if (name in _MODULES or name.startswith(_PACKAGES)) and isinstance(module, types.ModuleType):
                seen = known.get(name)
                same = seen is not None and seen.mark == seen.marked(module)
                self.modules[name] = seen if same and seen is not None else _Names(name, module)

    def changes(self, after: "State") -> list[str]:
        """Names of what is not as it was; what is new counts as an import."""
        found = changes(self.settings, after.settings)
        for name, names in self.modules.items():
            later = after.modules.get(name)
            if later is not names:
                found += changes(names.found, {} if later is None else later.found)
        return found


class _Names:
    """The names of a module.

    Attributes:
        found: Their identities.
        values: The objects behind them.
        members: What containers and classes among these contain.
        mark: Of all that, made in no time.
    """

    def __init__(self, name: str, module: types.ModuleType) -> None:
        self.found: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.members: dict[str, Any] = {}
        self._containers: list[Any] = []
        for key, value in list(vars(module).items()):
            # By type(): to ask torch's deprecated objects for their class makes them warn.
            kind = type(value)
            if key.startswith("__") or issubclass(kind, (types.ModuleType, random.Random)):
                continue
            full = f"{name}.{key}"
            self.values[full] = value
            self.found[full] = sorted(value) if full == _REGISTRY else _identity(value)
            if issubclass(kind, (dict, list, set)):
                self._containers.append(value)
            if issubclass(kind, list):
                self.members[full] = list(value)
            elif full in (_REGISTRY, _REGISTERED):
                self.members[full] = None if value is None else value.copy()
            if issubclass(kind, type) and (value.__module__ == name or name == "socket"):
                self._containers.append(value)
                members = {k: v for k, v in list(vars(value).items()) if k[:2] != "__"}
                self.members[f"{full}()"] = members
                self.found[f"{full}()"] = {k: _member_identity(v) for k, v in members.items()}
        self.mark = self.marked(module)

    def marked(self, module: types.ModuleType) -> Any:
        """The mark that the module has now."""
        inner = [
            tuple(map(id, vars(c).values())) if isinstance(c, type) else len(c) for c in self._containers
        ]
        dicts = [tuple(map(id, c.values())) for c in self._containers if issubclass(type(c), dict)]
        return tuple(map(id, vars(module).values())), inner, dicts


def forget_remote_code() -> None:
    """Take modules of folders' own code for not imported: another test's are in another cache of modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not as it was; what is new counts as an import."""
    return [name for name, value in before.items() if name not in _KEPT and after.get(name) != value]


def put_back(before: State, changed: list[str]) -> None:
    """Assign again what can be: settings, names of modules and classes. What is compiled is forgotten."""
    for name in changed:
        if name in before.settings:
            if name in _PUT_BACK:
                _PUT_BACK[name](before.settings[name])
            continue
        module, _, key = name.removesuffix("()").rpartition(".")
        names = before.modules[module]
        old = names.values[f"{module}.{key}"]
        if name == _REGISTRY:
            for each in (_REGISTRY, _REGISTERED):
                setattr(sys.modules[module], each.rpartition(".")[2], names.members[each])
        elif name.endswith("()"):
            _put_members_back(old, names.members[name])
        else:
            setattr(sys.modules[module], key, old)
            if isinstance(old, list):
                old[:] = names.members[name]


def _put_environment_back(old: dict[str, str]) -> None:
    for gone in os.environ.keys() - old.keys() - _NOBODYS:
        del os.environ[gone]
    os.environ.update(old)


def _put_path_back(old: list[str]) -> None:
    sys.path[:] = old


def _put_signals_back(old: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, old, strict=True):
        signal.signal(number, handler)


def _forget_what_is_compiled(old: int) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters["frames"]["total"] = old


_PUT_BACK: dict[str, Callable[[Any], Any]] = {
    "environment": _put_environment_back,
    "folder": os.chdir,
    "sys.path": _put_path_back,
    "dtype": torch.set_default_dtype,
    "grad": torch.set_grad_enabled,
    "matmul": torch.set_float32_matmul_precision,
    "deterministic": torch.use_deterministic_algorithms,
    "logging": logging.disable,
    "signals": _put_signals_back,
    "compiled": _forget_what_is_compiled,
}


def _put_members_back(owner: type, members: dict[str, Any]) -> None:
    for key in [key for key in vars(owner) if key[:2] != "__" and key not in members]:
        delattr(owner, key)
    for key, value in members.items():
        if vars(owner).get(key) is not value:
            setattr(owner, key, value)


def _member_identity(value: Any) -> Any:
    # torch wraps the step of an optimizer's class when it first makes one.
    return id(getattr(value, "__wrapped__", value) if getattr(value, "hooked", False) else value)


def _identity(value: Any) -> Any:
    kind = type(value)
    if issubclass(kind, dict):
        return id(value), [(key, id(member)) for key, member in list(value.items())]
    if issubclass(kind, (list, set)):
        return id(value), len(value)
    return value if kind in (int, str, bool, bytes) else id(value)

"""A model as it is used: inside its wrappers, with its tensors by name, and what was done to it.

What was done to a model (the mesh that it was sharded on, how its experts are placed) and what was found out
about it (which implementation computes its loss, that it does not mix the rows of a pack) is kept in one
record as long as the model lives, as torch's FSDP2 has one state for each module. A record belongs to the
model inside any wrappers. A copied or unpickled model has none.
"""

import copy
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_sft._compat.fsdp import reshard_within
from fsdp_sft.errors import UnsupportedModelError, abridged

T = TypeVar("T")

# Class name of a refused wrapper, and the reason.
_REFUSED = {
    "FullyShardedDataParallel": "it shards parameters and gradients out of sight (FSDP1)",
    "DataParallel": "it splits each batch over the devices of one process",
    "DeepSpeedEngine": "its gradients, norms and steps are its own",
}
# Class name of a wrapper that is looked through, and the attribute with the module inside.
_INSIDE = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "_FabricModule": "_forward_module",
}
_WAY_OUT = "hand over the model inside, made by shard_model (FSDP2) or DistributedDataParallel of the whole"
# An attribute of the model: in a global dict, a hook that refers to its model would keep it alive.
_NAME = "_fsdp_sft_record"


def tokenizer_of(given: Any) -> Any:
    """The tokenizer of a processor; anything else as it is.

    Raises:
        TypeError: For a name, or for rows.
    """
    if isinstance(given, (str, os.PathLike, list, tuple, dict)):
        raise TypeError(
            f"tokenizer must be a tokenizer, as AutoTokenizer.from_pretrained returns one, got a "
            f"{type(given).__name__}"
        )
    # A tokenizer may contain another one (mistral-common's), but a processor does not encode.
    return given if hasattr(given, "encode") else getattr(given, "tokenizer", given)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside any DistributedDataParallel, torch.compile and Lightning Fabric wrappers."""
    return with_wrappers(model)[-1]


def with_wrappers(model: nn.Module) -> list[nn.Module]:
    """The wrappers around a model that change no result, outermost first, and the model itself."""
    found = [model]
    while kinds := [cls.__name__ for cls in type(found[-1]).__mro__ if cls.__name__ in _INSIDE]:
        found.append(getattr(found[-1], _INSIDE[kinds[0]]))
    return found


def replicated_by(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel around the whole model, which may itself be inside another wrapper."""
    return next((m for m in with_wrappers(model) if isinstance(m, DistributedDataParallel)), None)


def replicas_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Ranks over which DistributedDataParallel averages the gradients; None for a model without it.

    Raises:
        UnsupportedModelError: If a wrapper, at any depth, hides its ranks or what it does to gradients.
    """
    around = replicated_by(model)
    for name, module in model.named_modules():
        cls = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _REFUSED), None)
        place = f"{type(model).__name__}{f' (at {name})' if name else ''}"
        if cls is not None:
            raise UnsupportedModelError(f"{place} is wrapped by {cls}: {_REFUSED[cls]}; {_WAY_OUT}")
        if isinstance(module, DistributedDataParallel) and module is not around:
            raise UnsupportedModelError(
                f"only a part of {place} is wrapped by DistributedDataParallel: ranks would average some "
                f"gradients and not others; {_WAY_OUT}"
            )
    return around.process_group if around is not None else None


def reshard(model: nn.Module) -> Any:
    """Reshard the gathered FSDP2 parameters of ``model``; does nothing to an ordinary model.

    After a forward without a backward the root's parameters stay gathered (torch's default), so all code that
    reads or writes parameters calls this first. What a failed forward or backward has left is dropped.

    Returns:
        The model inside any wrappers, of which it is known then that they hide nothing.

    Raises:
        UnsupportedModelError: If the model is in a wrapper that hides its parameters, or parameters were
            replaced after its first forward.
    """
    replicas_of(model)
    model = unwrapped(model)
    replaced = reshard_within(model)
    if replaced:
        fqns = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
        names = [f"{fqns.get(id(module), '?')}.{name}" for module, name in replaced]
        raise UnsupportedModelError(
            f"{abridged(names)} were replaced after the first forward of the sharded model: FSDP2 computes "
            "with the parameters that it has sharded, and puts them back. Replace them before shard_model, "
            "or change their values under torch.no_grad(): parameter.copy_(distribute_tensor(value, "
            "parameter.device_mesh, parameter.placements)), of torch.distributed.tensor"
        )
    return model


def base_of(model: nn.Module) -> Any:
    """The transformers model inside a peft model, still with its adapters; any other model as it is."""
    unwrap: Any = getattr(model, "get_base_model", None)
    return unwrap() if unwrap is not None else model


def original_class(model: nn.Module) -> type[nn.Module]:
    """The class that a model had before ``fully_shard`` replaced it by a generated subclass.

    transformers looks conversions up by the name of the class, and recognises its own code by ``__module__``;
    FSDP2's class has another name and another module.
    """
    from torch.distributed.fsdp import FSDPModule  # 0.7 s, which a worker that collates need not wait

    bases: Any = type(model).__mro__
    return next(base for base in bases if not issubclass(base, FSDPModule))  # type: ignore[no-any-return]


def is_a(value: Any, name: str, package: str) -> bool:
    """Whether a value is of a package's class of that name; the package need not be imported to know."""
    return any(
        base.__name__ == name and base.__module__.startswith(f"{package}.") for base in type(value).__mro__
    )


def transformers_models(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(prefix of its names, module) of each outermost transformers model in ``model``, itself included."""
    found: list[str] = []
    for fqn, module in model.named_modules():
        if is_a(module, "PreTrainedModel", "transformers") and not fqn.startswith(tuple(found)):
            found.append(f"{fqn}." if fqn else "")
            yield found[-1], module


def inner_model(model: nn.Module) -> str:
    """Advice for what takes transformers models alone: the one inside a module, if there is one."""
    name = next((prefix.rstrip(".") for prefix, _ in transformers_models(model) if prefix), None)
    return "" if name is None else f"; pass the one inside, model.{name}, which has the same parameters"


# The names of its tensors.


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """First FQN of each parameter."""
    return {parameter: clean_name(name) for name, parameter in unwrapped(model).named_parameters()}


# Names under which torch.compile(module) and checkpoint_wrapper hold a module: a part of every FQN in it.
_WITHIN = ("_orig_mod", "_checkpoint_wrapped_module")


def clean_name(name: str) -> str:
    """An FQN without the components that torch.compile(module) and checkpoint_wrapper add."""
    return name.replace(f"{_WITHIN[0]}.", "").replace(f"{_WITHIN[1]}.", "")


@contextmanager
def plain_names(model: nn.Module) -> Iterator[None]:
    """Take such wrappers out of a model, so that its modules and tensors have the names of a plain one."""
    found = [
        (parent, name, child)
        for parent in [*model.modules()]
        for name, child in parent._modules.items()
        if child is not None and child._modules.keys() & set(_WITHIN)
    ]
    try:
        for parent, name, child in found:
            inner: nn.Module | None = child
            while inner is not None and (keys := [key for key in _WITHIN if key in inner._modules]):
                inner = inner._modules[keys[0]]
            parent._modules[name] = inner
        yield
    finally:
        for parent, name, child in found:
            parent._modules[name] = child


def slot(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor or module, and its name in it."""
    parent, _, leaf = name.rpartition(".")
    return model.get_submodule(parent), leaf


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and every buffer, persistent or not, under each of its names."""
    inner = unwrapped(model)
    return {
        **dict(inner.named_parameters(remove_duplicate=False)),
        **dict(inner.named_buffers(remove_duplicate=False)),
    }


def with_tensors(module: nn.Module, full: Mapping[str, torch.Tensor], prefix: str = "") -> Any:
    """A copy of a module, without its hooks, that holds other tensors; the module stays as it is.

    Args:
        module: The module, sharded or not.
        full: Parameters and buffers of the copy by their names, after ``prefix``; others are the module's.
        prefix: Name of the module with a dot at its end, or nothing.
    """
    made: Any = object.__new__(original_class(module))
    for key, value in vars(module).items():
        own = copy.copy(value) if isinstance(value, (dict, list)) else value
        made.__dict__[key] = type(value)() if "_hooks" in key else own
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else with_tensors(child, full, f"{prefix}{name}.")
    for tensors in (made._parameters, made._buffers):
        for name in tensors.keys() & {key.removeprefix(prefix) for key in full}:
            tensors[name] = (
                nn.Parameter(full[prefix + name], False)
                if isinstance(tensors[name], nn.Parameter)
                else full[prefix + name]
            )
    return made


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors inside containers and objects (such as masks with attributes), but not inside modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, nn.Module):
        if not isinstance(value, (list, tuple)):
            value = (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values()
        for item in value:
            yield from tensors_in(item, depth - 1)


# What was done to it.


@dataclass
class Record:
    """What is known of one model.

    Attributes:
        model: The model.
        mesh: The mesh on which it was sharded; that of its parameters has no ``cp``.
        config: Fields of its config when it was built.
        values: One value per class, which belongs to the package that uses it.
    """

    model: "weakref.ref[nn.Module]"
    mesh: Any = None
    config: dict[str, Any] | None = None
    values: dict[type, Any] = field(default_factory=dict)

    def __reduce__(self) -> Any:  # copies too: a copied or unpickled model has no record
        return type(None), ()

    def keep(self, value: Any) -> None:
        """Remember ``value`` as long as the model lives, replacing one of the same class."""
        self.values[type(value)] = value

    def kept_or_new(self, kind: type[T]) -> T:
        """The value of that class, made without arguments if there is none."""
        return self.values.setdefault(kind, kind())  # type: ignore[no-any-return]


def record_of(model: nn.Module) -> Record:
    """The record of a model, wrapped or not."""
    inner = unwrapped(model)
    record: Record | None = inner.__dict__.get(_NAME)
    if record is None or record.model() is not inner:  # a copy's
        record = inner.__dict__[_NAME] = Record(weakref.ref(inner))
    return record


def kept_of(model: nn.Module, kind: type[T]) -> T | None:
    """The value of that class kept for a model; None if there is none."""
    return record_of(model).values.get(kind)

"""Wrappers that other libraries put around a model: some are looked through, others refused."""

import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_sft._compat.fsdp import composable_api_of
from fsdp_sft.errors import UnsupportedModelError

# Class name of a refused wrapper, and the reason.
_REFUSED = {
    "FullyShardedDataParallel": "it shards parameters and gradients out of sight (FSDP1)",
    "DataParallel": "it splits each batch over the devices of one process",
    "DeepSpeedEngine": "its gradients, norms and steps are its own",
}
# Class name of a wrapper that is looked through, and the attribute with the module inside.
_INSIDE = {"OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module"}
_WAY_OUT = "hand over the model inside, made by shard_model (FSDP2) or DistributedDataParallel of the whole"


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
    """The wrappers around a model, outermost first, and the model itself."""
    found = [model]
    while isinstance(inner := getattr(found[-1], _attribute(found[-1]), None), nn.Module):
        found.append(inner)
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
        if composable_api_of(module) == "replicate":
            raise UnsupportedModelError(
                f"{place} is replicated by replicate(), which cannot be seen; {_WAY_OUT}"
            )
        if isinstance(module, DistributedDataParallel) and module is not around:
            raise UnsupportedModelError(
                f"only a part of {place} is wrapped by DistributedDataParallel: ranks would average some "
                f"gradients and not others; {_WAY_OUT}"
            )
    return around.process_group if around is not None else None


def _attribute(model: nn.Module) -> str:
    """The attribute with the module inside a wrapper that changes no result; "" if it is no such wrapper."""
    return "module" if isinstance(model, DistributedDataParallel) else _INSIDE.get(type(model).__name__, "")


def base_of(model: nn.Module) -> Any:
    """The transformers model inside a peft model, still with its adapters; any other model as it is."""
    unwrap: Any = getattr(model, "get_base_model", None)
    return unwrap() if unwrap is not None else model


def transformers_models(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(prefix of its names, module) of each outermost transformers model in ``model``, itself included."""
    found: list[str] = []
    for fqn, module in model.named_modules():
        # By the name of the class, so that transformers is not imported for a model of another library.
        is_one = any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)
        if is_one and not any(fqn.startswith(prefix) for prefix in found):
            found.append(f"{fqn}." if fqn else "")
            yield found[-1], module


def is_transformers(model: nn.Module) -> bool:
    """Whether a model is one of transformers, and not a module around one."""
    return any(fqn == "" for fqn, _ in transformers_models(model))


def inner_model(model: nn.Module) -> str:
    """Advice for what takes transformers models alone: the one inside a module, if there is one."""
    name = next((prefix.rstrip(".") for prefix, _ in transformers_models(model) if prefix), None)
    return "" if name is None else f"; pass the one inside, model.{name}, which has the same parameters"

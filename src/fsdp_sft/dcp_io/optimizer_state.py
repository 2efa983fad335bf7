"""An optimizer's state by parameter name: read without a step, written sharded, put back exactly."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_sft._agree import agreed, this_rank
from fsdp_sft._disk import TensorReader, temporary_beside
from fsdp_sft._model import parameter_names
from fsdp_sft._safetensors import dtype_name
from fsdp_sft.dcp_io.codec import decode, encode
from fsdp_sft.dcp_io.folder import FolderContent, describe_mesh, open_folder, read_tensors, write_folder
from fsdp_sft.dcp_io.manifest import MANIFEST_NAME, Manifest
from fsdp_sft.distributed import reshard
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    abridged,
)

# These say how a step is computed, not what: the live optimizer's choice stands.
_IMPLEMENTATION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True)
class OptimizerContent:
    """An optimizer's state, ready to be written.

    Attributes:
        tensors: ``<fqn>/<state name>`` to the live tensor.
        info: Class, parameters, groups and other state, as JSON.
    """

    tensors: dict[str, torch.Tensor]
    info: dict[str, Any]


def save_optimizer_state(model: nn.Module, optimizer: Optimizer, path: str | os.PathLike[str]) -> None:
    """Write an optimizer's state to a folder: one safetensors file per rank, JSON for the rest.

    The optimizer is only read: a fresh one, or one with gradients pending, stays as it is. What is saved at
    ``path`` already is replaced once the new state is complete.

    Args:
        model: The model whose parameters the optimizer has.
        optimizer: Any optimizer whose tensors are 0-dim or have their parameter's shape.
        path: The folder; its parent is made.

    Raises:
        FileExistsError: If there is something else than an optimizer state at ``path``.
        ValueError: If a parameter of the optimizer is not the model's, or state has another shape.
        OSError: If writing fails on any rank; what was at ``path`` stays.

    Collective: all ranks.
    Memory: One local shard of a state tensor in CPU memory.
    """
    reshard(model)
    target = Path(path).absolute()
    aside = temporary_beside(target)
    with agreed(f"preparing to save {target}"):
        content = optimizer_content(model, optimizer)
        if this_rank() == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_file() or (
                target.is_dir() and os.listdir(target) and not (target / MANIFEST_NAME).exists()
            ):
                raise FileExistsError(
                    f"{target} exists and is not a saved optimizer state; choose another path"
                )
    write_folder(
        target,
        FolderContent(None, describe_mesh(model), optimizer=content.tensors, optimizer_info=content.info),
        aside=aside,
    )
    if this_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, path: str | os.PathLike[str]) -> None:
    """Put a saved state back into an optimizer, fresh or not, at any world size and mesh.

    Groups are matched by the names of their parameters; hyperparameters come from the file, except those
    that choose an implementation (``foreach``, ``fused``, ``capturable``, ``differentiable``).

    Args:
        model: The model whose parameters the optimizer has.
        optimizer: Of the class that was saved, over the same parameters in the same groups.
        path: What ``save_optimizer_state`` wrote, or one step of ``save_checkpoint``.

    Raises:
        CheckpointNotFoundError: If there is nothing at ``path``.
        CheckpointCorruptError: If a file is damaged; model and optimizer are untouched.
        CheckpointMismatchError: If the state is of another optimizer; both are untouched.

    Collective: all ranks.
    Memory: The state, and a 16 MiB buffer.
    """
    reshard(model)
    folder = Path(path).absolute()
    with agreed(f"looking for {folder}"):
        if not folder.is_dir():
            raise CheckpointNotFoundError(f"there is no optimizer state at {folder}")
    manifest, problems = open_folder(folder, hashes=True)
    if manifest is None:
        raise CheckpointCorruptError(f"{folder} is not sound: {'; '.join(problems[:5])}")
    with agreed(f"checking the optimizer against {folder}"):
        check_optimizer(manifest, model, optimizer)
    with agreed(f"reading {folder}"), TensorReader(folder) as reader:
        apply_optimizer(manifest, model, optimizer, reader)


def optimizer_content(model: nn.Module, optimizer: Optimizer) -> OptimizerContent:
    """Read an optimizer's state by name, changing nothing.

    Raises:
        ValueError: If a parameter is not the model's, or a tensor can not be sharded again.
        TypeError: If state or a hyperparameter is neither a tensor nor JSON.
    """
    names = parameter_names(model)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    parameters: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            fqn = _name_of(parameter, names)
            parameters[fqn] = [dtype_name(parameter.dtype), list(parameter.shape)]
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{fqn}/{name}"] = _checked_state(value, parameter, f"{fqn}/{name}")
                else:
                    values.setdefault(fqn, {})[name] = encode(value, f"optimizer state {name!r} of {fqn}")
    groups = [_encode_group(group, index, names) for index, group in enumerate(optimizer.param_groups)]
    info = {"class": type(optimizer).__name__, "parameters": parameters, "groups": groups, "values": values}
    return OptimizerContent(tensors, info)


def check_optimizer(manifest: Manifest, model: nn.Module, optimizer: Optimizer) -> None:
    """Compare a saved state with an optimizer, changing neither.

    Raises:
        CheckpointMismatchError: If it does not fit; the message lists the differences.
    """
    if manifest.optimizer is None:
        raise CheckpointMismatchError("no optimizer was saved there; optimizer=None loads the model alone")
    live, saved = optimizer_content(model, optimizer), manifest.optimizer_info
    problems = []
    if live.info["class"] != saved["class"]:
        problems.append(f"it is of {saved['class']}, the optimizer is {live.info['class']}")
    live_groups = {frozenset(group["params"]) for group in live.info["groups"]}
    saved_groups = {frozenset(group["params"]) for group in saved["groups"]}
    if live_groups != saved_groups:
        problems.append(_group_difference(live.info, saved))
    for fqn, described in saved["parameters"].items():
        actual = live.info["parameters"].get(fqn, described)
        if actual != described:
            problems.append(f"{fqn} was {_described(described)} and is {_described(actual)}")
    for name, tensor in manifest.optimizer.items():
        own = live.tensors.get(name)
        if own is not None and (own.dtype != tensor.dtype or tuple(own.shape) != tensor.shape):
            problems.append(f"{name} was {tensor.dtype} {tensor.shape} and is {own.dtype} {tuple(own.shape)}")
        shape = tuple(saved["parameters"][name.rpartition("/")[0]][1])
        if tensor.shape not in ((), shape):
            problems.append(f"{name} has the shape {tensor.shape}, its parameter {shape}")
    if problems:
        raise CheckpointMismatchError("the saved optimizer state does not fit: " + abridged(problems, "; "))


def apply_optimizer(manifest: Manifest, model: nn.Module, optimizer: Optimizer, reader: TensorReader) -> None:
    """Read the state of a manifest that ``check_optimizer`` has passed into the optimizer."""
    stored, info = manifest.optimizer or {}, manifest.optimizer_info
    by_name = {fqn: parameter for parameter, fqn in parameter_names(model).items()}
    saved_groups = {frozenset(group["params"]): group for group in info["groups"]}
    names = parameter_names(model)
    groups = [(g, saved_groups[frozenset(names[p] for p in g["params"])]) for g in optimizer.param_groups]
    options = {fqn: group for group, saved in groups for fqn in saved["params"]}
    states: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in stored.items():
        fqn, _, name = key.rpartition("/")
        live = optimizer.state.get(by_name[fqn], {}).get(name)
        if not isinstance(live, torch.Tensor):
            live = _new_state(by_name[fqn], name, tensor.shape, tensor.dtype, options[fqn])
        tensors[key] = states.setdefault(fqn, {})[name] = live
    for fqn, values in info["values"].items():
        states.setdefault(fqn, {}).update({name: decode(value) for name, value in values.items()})
    read_tensors(reader, stored, tensors)
    for group, saved in groups:
        _apply_options(group, saved["options"])
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            if names[parameter] in states:
                optimizer.state[parameter] = states[names[parameter]]


def _new_state(
    parameter: nn.Parameter, name: str, shape: tuple[int, ...], dtype: torch.dtype, options: Mapping[str, Any]
) -> torch.Tensor:
    if shape == tuple(parameter.shape) and (shape or name != "step"):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    # As torch places it: the count of steps is on the host unless the step runs on the device.
    on_device = name != "step" or options.get("fused") or options.get("capturable")
    device = parameter.device if on_device else torch.device("cpu")
    return torch.empty((), dtype=dtype, device=device)


def _name_of(parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    if parameter not in names:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; make "
            "the optimizer from model.parameters() after the model has been sharded"
        )
    return names[parameter]


def _checked_state(value: torch.Tensor, parameter: nn.Parameter, name: str) -> torch.Tensor:
    sharded_alike = isinstance(value, DTensor) == isinstance(parameter, DTensor)
    if value.ndim == 0 and not isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape or not sharded_alike:
        raise ValueError(
            f"{name} is a {type(value).__name__} {tuple(value.shape)}, its parameter a "
            f"{type(parameter).__name__} {tuple(parameter.shape)}: only 0-dim tensors and tensors like the "
            "parameter can be sharded again"
        )
    return value


def _encode_group(group: Mapping[str, Any], index: int, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    options = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()  # a learning rate that is a tensor; exact, a float64 holds any float32
        options[key] = encode(value, f"param_groups[{index}][{key!r}]")
    return {"params": [names[parameter] for parameter in group["params"]], "options": options}


def _apply_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, encoded in options.items():
        if key in _IMPLEMENTATION_OPTIONS and key in group:
            continue
        value = decode(encoded)
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _group_difference(live: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    missing = sorted(set(saved["parameters"]) - set(live["parameters"]))
    added = sorted(set(live["parameters"]) - set(saved["parameters"]))
    if missing or added:
        return (
            f"the optimizer lacks {len(missing)} of its parameters ({abridged(missing, ', ', 3)}) and has "
            f"{len(added)} others ({abridged(added, ', ', 3)}); freeze the same ones before making it"
        )
    sizes = [[len(group["params"]) for group in info["groups"]] for info in (saved, live)]
    return f"it has groups of {sizes[0]} parameters, the optimizer {sizes[1]}; group them as they were saved"


def _described(entry: list[Any]) -> str:
    return f"{entry[0]} {entry[1]}"

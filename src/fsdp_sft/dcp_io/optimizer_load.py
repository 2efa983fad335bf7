"""The optimizers in a checkpoint: comparing them with live ones, reading them, checking what was taken."""

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_sft._compat.modules import is_wrapper_subclass
from fsdp_sft._model.named import parameter_names
from fsdp_sft._model.sharded import reshard
from fsdp_sft._process.codec import decode
from fsdp_sft._ranks.agree import agreed, this_rank, through_rank_0
from fsdp_sft._tensors.disk import full_path, temporary_beside
from fsdp_sft._tensors.stored import StoredFolder
from fsdp_sft.dcp_io.content import FolderContent, OptimizerContent, describe_mesh
from fsdp_sft.dcp_io.folder import check_files, open_folder, read_tensors, write_folder
from fsdp_sft.dcp_io.inner_tensors import assemble_state, inner_names, names_to_take_apart, parts_problem
from fsdp_sft.dcp_io.manifest import MANIFEST_NAME, Manifest, per_optimizer
from fsdp_sft.dcp_io.optimizer_content import Optimizers, as_list, optimizer_content, with_inner_tensors
from fsdp_sft.dcp_io.stored import StoredTensor
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    abridged,
)

# Options that choose how a step is computed and not what it computes. The live optimizer's choice stays.
_IMPLEMENTATION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})

Saved = tuple[dict[str, Any], dict[str, StoredTensor]]  # information, and state by name


def check_optimizer(manifest: Manifest, model: nn.Module, optimizer: Optimizers) -> None:
    """Compare a saved state with one optimizer or several, changing nothing.

    Raises:
        CheckpointMismatchError: If it does not fit; the message lists the differences.
        UnstorableStateError: If an optimizer is of a kind that cannot be saved or loaded.
    """
    if manifest.optimizer is None:
        raise CheckpointMismatchError("no optimizer was saved there; optimizer=None loads the model alone")
    optimizer_content(model, optimizer)  # raises for an optimizer that could not take the state
    problems = []
    for live, saved in _pairs(manifest, model, as_list(optimizer)):
        problems += _problems(optimizer_content(model, live), *saved)
        by_name = {fqn: parameter for parameter, fqn in parameter_names(model).items()}
        for name, parts in saved[0].get("parts", {}).items():
            fqn = name.rpartition("/")[0]
            problem = parts_problem(name, by_name[fqn], parts) if fqn in by_name else None
            problems += [problem] if problem is not None else []
        shards = {name: by_name.get(name.rpartition("/")[0]) for name in saved[1]}
        like = {n: p for n, p in shards.items() if p is not None and tuple(p.shape) == saved[1][n].shape}
        check_files(manifest, saved[1], {name: like.get(name) for name in saved[1]})
    if problems:
        raise CheckpointMismatchError("the saved optimizer state does not fit: " + abridged(problems, "; "))


def apply_optimizer(
    manifest: Manifest, model: nn.Module, optimizer: Optimizers, folder: StoredFolder
) -> None:
    """Read a state that ``check_optimizer`` has accepted into the optimizers.

    Raises:
        CheckpointMismatchError: If an optimizer does not take all of it.
    """
    for live, (info, stored) in _pairs(manifest, model, as_list(optimizer)):
        _apply(live, parameter_names(model), info, stored, folder)


def _pairs(manifest: Manifest, model: nn.Module, live: list[Optimizer]) -> list[tuple[Optimizer, Saved]]:
    """Each live optimizer with the saved one that has the same parameters.

    Optimizers for which there is none are paired in the order of the list, so that the comparison can say how
    they differ.
    """
    saved = per_optimizer(manifest.optimizer_info, manifest.optimizer or {})
    if len(live) != len(saved):
        raise CheckpointMismatchError(
            f"the saved optimizer state does not fit: it is of {len(saved)} optimizers "
            f"({', '.join(info['class'] for info, _ in saved)}), and {len(live)} were given "
            f"({', '.join(type(one).__name__ for one in live)}); pass all of them as a list, optimizer=[...]"
        )
    names = parameter_names(model)
    left = list(saved)
    pairs: list[tuple[Optimizer, Saved]] = []
    others = []
    for one in live:
        own = {names.get(p, "") for group in one.param_groups for p in group["params"]}
        match = next((entry for entry in left if entry[0]["parameters"].keys() == own), None)
        if match is None:
            others.append(one)
        else:
            left = [entry for entry in left if entry is not match]
            pairs.append((one, match))
    return pairs + list(zip(others, left, strict=True))


def _problems(
    live: OptimizerContent, saved: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> list[str]:
    """How a saved optimizer differs from a live one; empty if it does not."""
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
    inside = inner_names(saved.get("parts", {}))
    for name, tensor in stored.items():
        if name in inside:
            continue
        own = live.tensors.get(name)
        if (
            own is not None
            and not is_wrapper_subclass(own)
            and (own.dtype != tensor.dtype or tuple(own.shape) != tensor.shape)
        ):
            problems.append(f"{name} was {tensor.dtype} {tensor.shape} and is {own.dtype} {tuple(own.shape)}")
        shape = tuple(saved["parameters"][name.rpartition("/")[0]][1])
        if tensor.shape not in ((), shape):
            problems.append(f"{name} has the shape {tensor.shape}, its parameter {shape}")
    return problems


def _apply(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    info: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    folder: StoredFolder,
) -> None:
    """Read one saved optimizer into a live one, whose existing state tensors are filled in place."""
    by_name = {fqn: parameter for parameter, fqn in names.items()}
    saved_groups = {frozenset(group["params"]): group for group in info["groups"]}
    groups = [(g, saved_groups[frozenset(names[p] for p in g["params"])]) for g in optimizer.param_groups]
    options = {fqn: group for group, saved in groups for fqn in saved["params"]}
    states: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    inside = inner_names(info.get("parts", {}))
    for key, parts in info.get("parts", {}).items():
        fqn, _, name = key.rpartition("/")
        whole = assemble_state(key, by_name[fqn], parts, stored, folder)
        states.setdefault(fqn, {})[name] = whole
    for key, tensor in stored.items():
        if key in inside:
            continue
        fqn, _, name = key.rpartition("/")
        live = optimizer.state.get(by_name[fqn], {}).get(name)
        if not isinstance(live, torch.Tensor) or is_wrapper_subclass(live):
            live = _new_state(by_name[fqn], name, tensor.shape, tensor.dtype, options[fqn])
        tensors[key] = states.setdefault(fqn, {})[name] = live
    for fqn, values in info["values"].items():
        states.setdefault(fqn, {}).update({name: decode(value) for name, value in values.items()})
    read_tensors(folder, stored, tensors)
    for group, saved in groups:
        _apply_options(group, saved["options"])
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            if names[parameter] in states:
                optimizer.state[parameter] = states[names[parameter]]
    _check_taken(optimizer, {by_name[fqn]: entries for fqn, entries in states.items()})


def _check_taken(optimizer: Optimizer, given: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
    """Compare the number of entries that were read with the number that the optimizer has now."""
    live = optimizer.state
    taken = sum(
        live.get(parameter, {}).get(name) is value
        for parameter, entries in given.items()
        for name, value in entries.items()
    )
    expected = sum(map(len, given.values()))
    present = sum(len(live.get(p, {})) for group in optimizer.param_groups for p in group["params"])
    if (taken, present) != (expected, expected):
        raise CheckpointMismatchError(
            f"{expected} entries of the state of {type(optimizer).__name__} were read, and it has taken "
            f"{taken} of them: pass the optimizers inside it as a list, optimizer=[...]"
        )


def _new_state(
    parameter: nn.Parameter, name: str, shape: tuple[int, ...], dtype: torch.dtype, options: Mapping[str, Any]
) -> torch.Tensor:
    """Memory for a new state, sharded like its parameter if it has the parameter's shape."""
    if shape == tuple(parameter.shape) and (shape or name != "step"):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    # Where torch puts it: the count of steps is on the host, unless the step itself runs on the device.
    on_device = name != "step" or options.get("fused") or options.get("capturable")
    device = parameter.device if on_device else torch.device("cpu")
    return torch.empty((), dtype=dtype, device=device)


def _apply_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set the saved options of a group; an option that is a tensor is filled in place."""
    for key, encoded in options.items():
        if key in _IMPLEMENTATION_OPTIONS and key in group:
            continue
        value = decode(encoded)
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _group_difference(live: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """How the parameter groups of a live optimizer and of a saved one differ, in words."""
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


# The state of an optimizer alone, in a folder: read without a step, written sharded, restored exactly.


def save_optimizer_state(model: nn.Module, optimizer: Optimizers, path: str | os.PathLike[str]) -> None:
    """Write an optimizer's state to a folder: one safetensors file per rank, and JSON for the rest.

    The optimizer is only read, so a fresh one stays fresh and gradients stay where they are. An earlier state
    at ``path`` is replaced once the new one is complete.

    Args:
        model: Model whose parameters the optimizer has.
        optimizer: Any optimizer whose tensors are 0-dim or have their parameter's shape; or a list of
            optimizers with disjoint parameters.
        path: Folder to write; its parent is made if it is not there.

    Raises:
        FileExistsError: If something other than an optimizer state is at ``path``.
        ValueError: If a parameter of the optimizer is not the model's.
        UnstorableStateError: If there is state that could not be loaded again.
        OSError: If writing fails on any rank; what was at ``path`` stays.

    Collective: all ranks.
    Memory: One local shard of a state tensor in CPU memory.

    Example:
        >>> result = fs.train_step(model, window, optimizer)
        >>> fs.save_optimizer_state(model, optimizer, "adamw")
        >>> sorted(file.name for file in Path("adamw").iterdir())
        ['INDEX.json', 'MANIFEST.json', 'shards']
    """
    reshard(model)
    target = full_path(path)
    aside = temporary_beside(target)
    prepared: list[OptimizerContent] = []

    def prepare() -> list[str]:
        prepared.append(optimizer_content(model, optimizer))
        return names_to_take_apart(prepared[0].tensors)

    def make_room(everyone: list[list[str]]) -> list[str]:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() or (
            target.is_dir() and os.listdir(target) and not (target / MANIFEST_NAME).exists()
        ):
            raise FileExistsError(f"{target} exists and is not a saved optimizer state; choose another path")
        return sorted(set().union(*everyone))

    to_take_apart = through_rank_0(f"preparing to save {target}", prepare, make_room)
    content = with_inner_tensors(prepared[0], to_take_apart)
    write_folder(target, FolderContent(None, describe_mesh(model), optimizer=content), aside=aside)
    if this_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)


def load_optimizer_state(model: nn.Module, optimizer: Optimizers, path: str | os.PathLike[str]) -> None:
    """Load a saved state into an optimizer, fresh or not, at any world size and mesh.

    Groups are matched by the names of their parameters. Hyperparameters come from the file, except those that
    choose an implementation (``foreach``, ``fused``, ``capturable``, ``differentiable``).

    Args:
        model: Model whose parameters the optimizer has.
        optimizer: Optimizer of the class that was saved, with the same parameters in the same groups; or a
            list of all optimizers that were saved together, in any order.
        path: Folder that ``save_optimizer_state`` wrote, or one step of ``save_checkpoint``.

    Raises:
        CheckpointNotFoundError: If there is nothing at ``path``.
        CheckpointCorruptError: If a file is damaged; model and optimizer are untouched.
        CheckpointMismatchError: If the state is of another optimizer; model and optimizer are untouched. Or
            if the optimizer has not taken everything that was read.

    Collective: all ranks.
    Memory: The state, and a buffer of 1 MiB (for an accelerator two of 8 MiB) for each of at most 4 threads.

    Example:
        >>> result = fs.train_step(model, window, optimizer)
        >>> fs.save_optimizer_state(model, optimizer, "adamw")
        >>> fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
        >>> fs.load_optimizer_state(model, fresh, "adamw")
        >>> fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        True
    """
    reshard(model)
    folder = full_path(path)
    with agreed(f"looking for {folder}"):
        if not folder.is_dir():
            raise CheckpointNotFoundError(f"there is no optimizer state at {folder}")
    manifest, problems = open_folder(folder, hashes=True)
    if manifest is None:
        raise CheckpointCorruptError(f"{folder} is not sound: {'; '.join(problems[:5])}")
    with agreed(f"checking the optimizer against {folder}"):
        check_optimizer(manifest, model, optimizer)
    with agreed(f"reading {folder}"):
        apply_optimizer(manifest, model, optimizer, StoredFolder(folder))

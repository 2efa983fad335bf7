"""Opening another tool's checkpoint: which tool has written it, and what it holds by name."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp_sft._process.codec import MALFORMED
from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.boxes import Box, part_of
from fsdp_sft._tensors.pickle_data import NotDataError
from fsdp_sft._tensors.reader import read_jobs
from fsdp_sft._tensors.safetensors import open_file
from fsdp_sft._tensors.stored import InFile
from fsdp_sft._tensors.torch_file import BROKEN_ARCHIVE, SavedTensor, TorchFile, Unusual, read_torch_file
from fsdp_sft.dcp_io.foreign.dcp_folder import METADATA_NAME, DcpFolder, below, plain_value
from fsdp_sft.dcp_io.foreign.names import kind_of
from fsdp_sft.dcp_io.foreign.source import ForeignCheckpoint, ForeignTensor, split_optimizer, step_of
from fsdp_sft.dcp_io.steps import step_number
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    FsdpSftError,
)

_MOST_OF_AN_OPTION = 64  # numbers; the step is one, and options are a few
_OPTIMIZERS = ("optimizer.", "optim.", "opt.", "optimizers.")
_BESIDE = ("train_state.", "lr_scheduler.", "dataloader.")  # what else stands beside a model
_COUNTERS = ("train_state.step", "step", "global_step")
FORMATS = ("auto", "accelerate", "dcp", "full")
_SHARDED, _OPTIMIZER, _FULL, _FULL_OPTIMIZER = (
    "pytorch_model_fsdp_0",
    "optimizer_0",
    "pytorch_model_fsdp.bin",
    "optimizer.bin",
)


def open_foreign(source: Path, kind: str, *, allow_pickle: bool) -> ForeignCheckpoint:
    """Read the names, shapes and dtypes of a checkpoint, not its numbers.

    Args:
        source: Folder of the checkpoint.
        kind: Format of the checkpoint, one of ``FORMATS``.
        allow_pickle: Whether a ``torch.save`` file of the whole model may be read.

    Raises:
        CheckpointNotFoundError: If there is no such checkpoint.
        CheckpointFormatError: If it is a pickle and ``allow_pickle`` is False, or holds objects.
        CheckpointCorruptError: If it is damaged.
    """
    places = {
        "accelerate": source / _SHARDED / METADATA_NAME,
        "dcp": source / METADATA_NAME,
        "full": source / _FULL,
    }
    found = next((k for k, place in places.items() if kind in ("auto", k) and place.is_file()), None)
    if found is None:
        wanted = ", ".join(str(p.relative_to(source)) for k, p in places.items() if kind in ("auto", k))
        raise CheckpointNotFoundError(
            f"there is no checkpoint of another tool at {source}: looked for {wanted}"
        )
    if found == "full" and not allow_pickle:
        raise CheckpointFormatError(
            f"{source / _FULL} is a pickle; allow_pickle=True reads the tensors in it as data, "
            "and runs nothing of it"
        )
    reader = {"accelerate": _accelerate, "dcp": _one_folder, "full": _full}[found]
    try:
        foreign = reader(source)
        _check_groups(foreign.groups)
        return foreign
    except FsdpSftError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError) as error:
        raise CheckpointCorruptError(f"{source} is not what a checkpoint is: {error!r}") from None


def _check_groups(groups: list[Any]) -> None:
    """Refuse groups of an optimizer that do not list their parameters."""
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), (list, tuple)):
            raise CheckpointCorruptError("the optimizer's groups do not say their parameters")


def _accelerate(source: Path) -> ForeignCheckpoint:
    """Sharded state dicts of Accelerate or Trainer: one folder for the model and one for the optimizer."""
    folder = DcpFolder(source / _SHARDED)
    states: dict[tuple[str, str], Any] = {}
    groups: list[dict[str, Any]] = []
    if (source / _OPTIMIZER / METADATA_NAME).is_file():
        optimizer = DcpFolder(source / _OPTIMIZER)
        keys = below({**optimizer.tensors, **dict.fromkeys(optimizer.others)}, "optimizer.")
        states, groups = split_optimizer(keys, lambda key: _value(optimizer, f"optimizer.{key}"))
    model = below(folder.tensors, "model.")
    others = tuple(below(dict.fromkeys(folder.others), "model."))
    step = _trainer_step(source)
    return ForeignCheckpoint("accelerate", model, _tensors_only(states), groups, step, others)


def _one_folder(source: Path) -> ForeignCheckpoint:
    """One folder of torch's distributed checkpoint with everything in it.

    torchtitan stores the model's names without a prefix, torchtune and others with ``model.`` in front, and
    torch's recipe all of it below one name, such as ``app.``.
    """
    folder = DcpFolder(source)
    every = {**folder.tensors, **dict.fromkeys(folder.others)}
    outer = _one_name_around(every)
    keys, tensors = below(every, outer), below(folder.tensors, outer)
    prefix = next((p for p in _OPTIMIZERS if any(key.startswith(p) for key in keys)), _OPTIMIZERS[0])
    optimizer = below(keys, prefix)
    states, groups = split_optimizer(optimizer, lambda key: _value(folder, outer + prefix + key))
    rest = {key: tensor for key, tensor in tensors.items() if not key.startswith(prefix)}
    inner = below(rest, "model.")
    model = inner if kind_of(inner) is not None else rest
    model = {key: tensor for key, tensor in model.items() if not key.startswith(_BESIDE)}
    counters = [outer + key for key in _COUNTERS if key in keys]
    where = f"{source / METADATA_NAME}: {(counters or [''])[0]}"
    step = step_of(_value(folder, counters[0]), where) if counters else step_number(source)
    extra = tuple(key for key in folder.others if key.endswith("_extra_state"))
    return ForeignCheckpoint(kind_of(model) or "dcp", model, _tensors_only(states), groups, step, extra)


def _one_name_around(keys: Mapping[str, Any]) -> str:
    """The name that stands before a model and what belongs to it, with its dot; empty if there is none."""
    heads = {key.partition(".")[0] for key in keys}
    head = f"{heads.pop()}." if len(heads) == 1 else ""
    inner = {f"{key.partition('.')[0]}." for key in below(keys, head)}
    known = {"model.", *_OPTIMIZERS, *_BESIDE, *(f"{name}." for name in _COUNTERS)}
    return head if "model." in inner and inner <= known else ""


def _full(source: Path) -> ForeignCheckpoint:
    """Full state dicts of Accelerate or Trainer: one file for the model and one for the optimizer."""
    path = source / _FULL
    saved = _opened(path)
    model = {str(name): _in_file(path, saved, name) for name, one in saved.value.items() if _is_tensor(one)}
    others = tuple(str(name) for name, one in saved.value.items() if not _is_tensor(one))
    states: dict[tuple[str, str], ForeignTensor] = {}
    groups: list[dict[str, Any]] = []
    path = source / _FULL_OPTIMIZER
    if path.is_file():
        saved = _opened(path)
        groups = [plain_value("param_groups", dict(group)) for group in saved.value.get("param_groups", [])]
        for name, entries in saved.value.get("state", {}).items():
            inner = TorchFile(entries, saved.records)
            for key, one in entries.items():
                found = _in_file(path, inner, key) if _is_tensor(one) else _in_memory(torch.as_tensor(one))
                states[str(name), str(key)] = found
    return ForeignCheckpoint("full", model, states, groups, _trainer_step(source), others)


def _opened(path: Path) -> TorchFile:
    """A file of ``torch.save`` that holds a dict, without the bytes of its tensors."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            saved = read_torch_file(file)
    except NotDataError as error:
        raise CheckpointFormatError(
            f"{path} has objects in it, which are not unpickled: that could run any code ({error})"
        ) from None
    except (OSError, ValueError, *BROKEN_ARCHIVE) as error:
        blame_no_file(error, path)
        raise CheckpointCorruptError(f"{path} is cut short or damaged: {error}") from None
    if not isinstance(saved.value, dict):
        raise CheckpointCorruptError(f"{path} is not a dict of tensors")
    return saved


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (SavedTensor, Unusual))


def _in_file(path: Path, saved: TorchFile, name: Any) -> ForeignTensor:
    """A tensor of a file, which is read by position."""
    try:
        entry = saved.entry(str(name), saved.value[name])
    except ValueError as error:
        raise CheckpointCorruptError(f"{path}: {error}") from None
    stored = InFile(path, entry)

    def read(wanted: Box) -> torch.Tensor:
        out = torch.empty(wanted.shape, dtype=entry.dtype)
        jobs = stored.jobs(str(name), stored.piece(str(name)), wanted, out)
        read_jobs(jobs, damaged=CheckpointCorruptError)
        return out

    return ForeignTensor(entry.shape, entry.dtype, read)


def _in_memory(tensor: torch.Tensor) -> ForeignTensor:
    """A number as a tensor of another checkpoint."""
    return ForeignTensor(tuple(tensor.shape), tensor.dtype, lambda wanted: part_of(tensor, wanted).clone())


def _value(folder: DcpFolder, key: str) -> Any:
    """An entry of a folder, which is the step or an option, as a Python value; a tensor as nested lists."""
    if key not in folder.tensors:
        return folder.value(key)
    tensor = folder.tensors[key]
    if math.prod(tensor.shape) > _MOST_OF_AN_OPTION:
        raise CheckpointFormatError(f"{key!r} has the shape {tensor.shape}, and is a number or a few")
    return tensor.read(Box((0,) * len(tensor.shape), tensor.shape)).tolist()


def _tensors_only(states: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], ForeignTensor]:
    """The states of an optimizer, all of which must be tensors."""
    others = [".".join(key) for key, stored in states.items() if not isinstance(stored, ForeignTensor)]
    if others:
        raise CheckpointFormatError(f"the optimizer's state has {others[:3]}, which are not tensors")
    return dict(states)


def _trainer_step(source: Path) -> int | None:
    """The step in ``trainer_state.json`` of transformers' Trainer; None if there is no such file."""
    path = source / "trainer_state.json"
    if not path.is_file():
        return None
    try:
        return step_of(json.loads(path.read_text())["global_step"], f"global_step in {path}")
    except MALFORMED as error:
        raise CheckpointCorruptError(f"{path} does not say the step: {error!r}") from None

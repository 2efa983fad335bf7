"""What a rank contributes to a save: tensors with their places in the files, and all other state."""

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.sharded import mesh_of
from fsdp_sft._model.state import ModelTensors
from fsdp_sft._process.codec import dumps
from fsdp_sft._ranks.agree import this_rank, world_size
from fsdp_sft._tensors.boxes import Box, local_of, whole
from fsdp_sft._tensors.safetensors import num_bytes
from fsdp_sft._tensors.sharding import Sharding, one_rank, sharding_of
from fsdp_sft.dcp_io.manifest import Manifest, encode_tensors, versions
from fsdp_sft.dcp_io.stored import StoredTensor, file_key, shard_file
from fsdp_sft.errors import CheckpointError

_LARGE_BYTES = 1 << 20  # smaller tensors that all ranks have lie together, in rank 0's file

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class OwnedTensor:
    """A tensor that a single rank has and writes. All ranks know its shape and dtype.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype of its elements.
        owner: Rank that has it.
        tensor: Values of the tensor on that rank; None on the others.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    tensor: torch.Tensor | None


@dataclass(frozen=True)
class OptimizerContent:
    """An optimizer's state, ready to be written.

    Attributes:
        tensors: Tensors of the state by ``<fqn>/<state name>``: live ones, or an ``OwnedTensor`` for each
            inner tensor.
        info: Class, parameters, groups and state other than tensors, as JSON; see ``Manifest``.
    """

    tensors: Mapping[str, Any]
    info: dict[str, Any]


@dataclass(frozen=True)
class FolderContent:
    """What a rank contributes to a save. Tensors are the live ones, whole or sharded.

    Attributes:
        step: Number of the step, or None.
        mesh: Name and size of each axis of the mesh; see ``Manifest``.
        metric: Metric of the step; see ``Manifest``.
        model: Tensors of the model; None where an optimizer's state is saved alone.
        optimizer: State of the optimizer; None if there is none.
        train_state: Bytes of ``train_state.json``; rank 0's are written.
        rank_content: State of this rank alone, as tensors by their names in the file.
        settings: Bytes of small files below ``settings/``, by name; rank 0's are written.
    """

    step: int | None
    mesh: list[list[Any]] | None
    metric: float | None = None
    model: ModelTensors | None = None
    optimizer: OptimizerContent | None = None
    train_state: bytes | None = None
    rank_content: dict[str, torch.Tensor] | None = None
    settings: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def sections(self) -> dict[str, Mapping[str, Any]]:
        """Tensors by name, of each section: the model and the optimizer."""
        found: dict[str, Mapping[str, Any]] = {}
        if self.model is not None:
            found["model"] = self.model.tensors
        if self.optimizer is not None:
            found["optimizer"] = self.optimizer.tensors
        return found

    @functools.cached_property
    def stored(self) -> dict[str, dict[str, StoredTensor]]:
        """Which rank writes which part of each tensor, by section and name; the same on all ranks.

        Raises:
            CheckpointError: If two tensors would have the same name in the files.
        """
        found: dict[str, dict[str, StoredTensor]] = {}
        for section, tensors in self.sections.items():
            found[section] = {
                name: _stored(section, name, tensors[name], index)
                for index, name in enumerate(sorted(tensors))
            }
            if len({tensor.key for tensor in found[section].values()}) != len(tensors):
                raise CheckpointError(f"two tensors of the {section} would have one name in the files")
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each of which is stored once, without what belongs to a rank."""
        return sum(num_bytes(t.dtype, t.shape) for section in self.stored.values() for t in section.values())

    def manifest(self) -> Manifest:
        """The manifest without the records of the files, which are known only when these are written."""
        return Manifest(
            step=self.step,
            world_size=world_size(),
            mesh=self.mesh,
            metric=self.metric,
            model=self.stored.get("model"),
            ties=self.model.ties if self.model is not None else {},
            frozen=self.model.frozen if self.model is not None else [],
            optimizer=self.stored.get("optimizer"),
            optimizer_info=self.optimizer.info if self.optimizer is not None else {},
            rank_states=self.rank_content is not None,
            versions=versions(),
        )

    def tensors_digest(self) -> str:
        """SHA-256 of all names, shapes, dtypes and shardings, in which ranks must not differ."""
        return hashlib.sha256(dumps(encode_tensors(self.stored))).hexdigest()


@dataclass(frozen=True)
class Part:
    """The part of one tensor that this rank writes.

    Attributes:
        shape: Shape of the full tensor.
        box: Box of the full tensor that the part is.
        tensor: Values of the part: the live ones, or a copy.
    """

    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


Parts = Mapping[str, Part]  # by the tensor's name in the file


def _stored(section: str, name: str, tensor: Any, index: int) -> StoredTensor:
    """A tensor as the manifest describes it; ``index`` is its number within the section."""
    if isinstance(tensor, OwnedTensor):
        sharding = one_rank(tensor.owner)
    else:
        sharding = sharding_of(tensor)
    key, copy = file_key(section, name), _copy(sharding, tensor, index)
    return StoredTensor(tuple(tensor.shape), tensor.dtype, key, sharding, copy)


def _copy(sharding: Sharding, tensor: Any, index: int) -> int:
    """Number of the copy that is written of a tensor that several ranks have.

    Ranks with the same part take turns, from tensor to tensor, except for small tensors that all ranks have.
    Step counts are one small tensor per parameter; spread over ranks, they would make every loading rank open
    every file.
    """
    size = tensor.dtype.itemsize * math.prod(tensor.shape)
    return index % sharding.copies if sharding.splits or size >= _LARGE_BYTES else 0


def describe_mesh(model: nn.Module) -> list[list[Any]] | None:
    """Name and size of each axis of a model's mesh."""
    mesh = mesh_of(model)
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
    return [[name, size] for name, size in zip(names, mesh.shape, strict=True)]


def own_parts(content: FolderContent) -> Parts:
    """The live parts that this rank writes. Replicas take turns, so that each part is written once."""
    own = shard_file(this_rank())
    parts: dict[str, Part] = {}
    for section, tensors in content.sections.items():
        for name, entry in content.stored[section].items():
            box = entry.part_in(own)
            if box is not None:
                parts[entry.key] = Part(entry.shape, box, _values(name, tensors[name], box))
    for key, tensor in (content.rank_content or {}).items():
        parts[key] = Part(tuple(tensor.shape), whole(tensor.shape), tensor)
    return parts


def _values(name: str, live: Any, box: Box) -> torch.Tensor:
    """The values of this rank's part of a tensor, which must be the box ``box`` of it."""
    local = live.tensor if isinstance(live, OwnedTensor) else local_of(live)
    if local is None or tuple(local.shape) != box.shape:
        found = None if local is None else tuple(local.shape)
        raise CheckpointError(
            f"rank {this_rank()} has {found} of {name}; its mesh and placements give it {box.shape}"
        )
    return local


# Metadata in the header of a rank's file, with which its tensors can be placed without the manifest.
#
# torch's distributed checkpoint reads a folder of such files by ``DCP_SHARDING_INFO``, which says for every
# name in the file where in the full tensor the part begins. It infers the shape of the full tensor from the
# parts that it finds, so the shapes are stated too, under a name of this library.
#
# Source: ``torch/distributed/checkpoint/hf_storage.py``, ``HuggingFaceStorageReader.read_metadata``.

_OFFSETS = "DCP_SHARDING_INFO"
_OWN = "fsdp_sft"


def header_metadata(step: int | None, world_size: int, rank: int, parts: Parts) -> dict[str, str]:
    """The metadata of one file.

    Args:
        step: Number of the checkpoint's step.
        world_size: Number of ranks that write the checkpoint.
        rank: Rank that writes the file.
        parts: What the file holds.
    """
    shapes = {key: list(part.shape) for key, part in parts.items()}
    offsets = {key: {"saved_offsets": list(part.box.offset)} for key, part in parts.items()}
    own: dict[str, Any] = {"step": step, "world_size": world_size, "rank": rank, "shapes": shapes}
    return {
        "format": "pt",
        _OFFSETS: json.dumps(offsets),
        _OWN: dumps(own).decode(),
    }


def placed_in(metadata: Mapping[str, str]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """(shape of the full tensor, index in it at which the part begins), by name in the file.

    Raises:
        KeyError, TypeError, ValueError: If the file is not from a checkpoint of this library.
    """
    shapes, offsets = json.loads(metadata[_OWN])["shapes"], json.loads(metadata[_OFFSETS])
    return {key: (tuple(shapes[key]), tuple(entry["saved_offsets"])) for key, entry in offsets.items()}


def rank_in(metadata: Mapping[str, str]) -> tuple[int, int, int | None]:
    """(rank, world size, step) of a file.

    Raises:
        KeyError, TypeError, ValueError: If the file is not from a checkpoint of this library.
    """
    own = json.loads(metadata[_OWN])
    return int(own["rank"]), int(own["world_size"]), own["step"]

"""Writing a folder of sharded tensors so that it is there completely or not at all, and opening one."""

import shutil
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_sft._agree import this_rank, through_rank_0, world_size
from fsdp_sft._boxes import Box, box_of, local_of, owner_ranks, whole
from fsdp_sft._disk import (
    FileRecord,
    TensorReader,
    publish,
    read_into,
    sync_folder,
    temporary_beside,
    write_bytes,
    write_tensors,
)
from fsdp_sft._model import ModelTensors
from fsdp_sft.dcp_io.manifest import (
    MANIFEST_NAME,
    TRAIN_STATE_NAME,
    Manifest,
    StoredTensor,
    encode_manifest,
    file_problems,
    read_manifest,
    tiling_problems,
    versions,
)
from fsdp_sft.dcp_io.rank_files import write_rank_files
from fsdp_sft.distributed import mesh_of
from fsdp_sft.errors import CheckpointCorruptError, CheckpointError

_VISIBLE_SECONDS = 5.0  # a network file system may show a new folder late

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class OwnedTensor:
    """A tensor that one rank has and writes; all know of it.

    Attributes:
        shape: Of all of it.
        dtype: Of its elements.
        owner: The rank.
        tensor: Its values on that rank, None elsewhere.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    tensor: torch.Tensor | None


@dataclass(frozen=True)
class FolderContent:
    """What a rank brings to a save; tensors are the live ones, whole or sharded.

    Attributes:
        step: Number of the step, or None.
        mesh: As in the manifest.
        metric: As in the manifest.
        model: None for an optimizer state of its own.
        extra: As in the manifest.
        extra_tensors: Those that ``extra`` refers to.
        optimizer: ``<fqn>/<state name>`` to tensor or ``OwnedTensor``, or None.
        optimizer_info: As in the manifest.
        train_state: The bytes of ``train_state.json``; rank 0's are written.
        rank_content: This rank's own JSON and tensors.
        settings: Name to bytes of small files below ``settings/``; rank 0's are written.
    """

    step: int | None
    mesh: list[list[Any]] | None
    metric: float | None = None
    model: ModelTensors | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    extra_tensors: Tensors = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    optimizer_info: dict[str, Any] = field(default_factory=dict)
    train_state: bytes | None = None
    rank_content: tuple[bytes, dict[str, torch.Tensor]] | None = None
    settings: Mapping[str, bytes] = field(default_factory=dict)

    def with_own_copies(self) -> "FolderContent":
        """The same, with copies of the tensors that the caller gave for this rank."""
        if self.rank_content is None:
            return self
        text, tensors = self.rank_content
        return replace(self, rank_content=(text, {n: t.detach().clone() for n, t in tensors.items()}))

    @property
    def folders(self) -> list[str]:
        """What to make below the folder."""
        rest = {"rank": self.rank_content is not None, "settings": bool(self.settings)}
        return [*self.sections, *(name for name, there in rest.items() if there)]

    @property
    def sections(self) -> dict[str, Mapping[str, Any]]:
        """Folder to the tensors in it."""
        found: dict[str, Mapping[str, Any]] = {}
        if self.model is not None:
            found["model"] = {**self.model.tensors, **self.extra_tensors}
        if self.optimizer is not None:
            found["optimizer"] = self.optimizer
        return found


@dataclass(frozen=True)
class Part:
    """What this rank writes of one tensor.

    Attributes:
        box: Where in the tensor it lies.
        tensor: Its values: the live ones, or a copy.
    """

    box: Box
    tensor: torch.Tensor


Parts = Mapping[str, Mapping[str, Part]]  # section -> tensor -> part


@dataclass(frozen=True)
class _Written:
    files: dict[str, FileRecord]
    chunks: dict[str, dict[str, tuple[str, Box]]]  # section -> tensor -> (file, box)


def describe_mesh(model: nn.Module) -> list[list[Any]] | None:
    """Name and size of each axis of a model's mesh."""
    mesh = mesh_of(model)
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
    return [[name, size] for name, size in zip(names, mesh.shape, strict=True)]


def new_folder_beside(target: Path, content: FolderContent) -> Path:
    """Make a temporary folder beside ``target`` for what ``content`` writes; by rank 0 alone."""
    temporary = temporary_beside(target)
    for name in ("", *content.folders):
        (temporary / name).mkdir()
    return temporary


def write_folder(
    target: Path,
    content: FolderContent,
    *,
    aside: Path | None = None,
    parts: Parts | None = None,
    temporary: Path | None = None,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Write ``content`` to a temporary folder beside ``target``, and rename it when it is complete.

    Args:
        target: Where to; its parent must exist for rank 0.
        content: What to write; all ranks with the same names.
        aside: Where rank 0 moves what is at ``target``, just before the rename.
        parts: ``own_parts(content)`` or a copy of it; None takes the live values.
        temporary: What ``new_folder_beside`` has made, on all ranks; None makes one.
        then: What rank 0 does when the folder is in its place, while the others wait.

    Raises:
        CheckpointError: If ranks do not share a file system, or their parts do not make up a tensor.
        OSError: If writing fails on any rank. Nothing is left behind, ``target`` is as it was.

    Collective: all ranks; all raise the same error.
    """
    if temporary is None:
        temporary = through_rank_0(
            f"creating a folder beside {target}", lambda: None, lambda _: new_folder_beside(target, content)
        )
    place = temporary

    def write() -> _Written:
        _wait_until_visible(place)
        return _write_own(place, content, own_parts(content) if parts is None else parts)

    def commit(everything: list[_Written]) -> None:
        _commit(place, target, content, everything, aside)
        then()

    try:
        through_rank_0(f"writing {target.name}", write, commit)
    except BaseException:
        if this_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
        raise


def open_folder(folder: Path, *, hashes: bool) -> tuple[Manifest | None, list[str]]:
    """Read a folder's manifest on every rank and check its files, each on one rank.

    Returns:
        (manifest, or None if it is not sound; problems of any rank, the same list on all of them).

    Collective: all ranks.
    """
    manifest: Manifest | None = None

    def look() -> tuple[list[str], str | None]:
        nonlocal manifest
        try:
            manifest = read_manifest(folder)
        except CheckpointCorruptError as error:
            return [str(error)], None
        by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
        own = by_size[this_rank() :: world_size()]
        return file_problems(folder, manifest, own, hashes=hashes), manifest.digest

    def merge(found: list[tuple[list[str], str | None]]) -> list[str]:
        merged = list(dict.fromkeys(problem for own, _ in found for problem in own))
        if not merged and len({digest for _, digest in found}) != 1:
            merged = [f"ranks see different files at {folder}; all of them must share its file system"]
        return merged

    problems = through_rank_0(f"checking {folder}", look, merge)
    return (None if problems else manifest), problems


def read_tensors(reader: TensorReader, stored: Mapping[str, StoredTensor], tensors: Tensors) -> None:
    """Fill this rank's part of each tensor from the files."""
    for name, tensor in tensors.items():
        box = box_of(tensor)
        if box.numel:
            read_into(reader, name, stored[name].chunks, box, local_of(tensor))


def _wait_until_visible(folder: Path) -> None:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank {this_rank()} does not see {folder}, which rank 0 has made: all ranks must write to "
                "one shared file system; choose a folder on it, by an absolute path"
            )
        time.sleep(0.05)


def own_parts(content: FolderContent) -> Parts:
    """What this rank writes, live: replicas take turns, so that each part is written once."""
    return {section: _parts_of(tensors) for section, tensors in content.sections.items()}


def _parts_of(tensors: Mapping[str, Any]) -> dict[str, Part]:
    rank = this_rank()
    parts: dict[str, Part] = {}
    for index, name in enumerate(sorted(tensors)):
        if isinstance(tensors[name], OwnedTensor):
            tensor = tensors[name].tensor
            if tensor is not None and tensor.numel():
                parts[name] = Part(whole(tensor.shape), tensor)
        elif rank in owner_ranks(tensors[name], index):
            box = box_of(tensors[name])
            if box.numel:
                parts[name] = Part(box, local_of(tensors[name]))
    return parts


def _write_own(folder: Path, content: FolderContent, parts: Parts) -> _Written:
    rank = this_rank()
    written = _Written({}, {})
    for section, own in parts.items():
        if own:
            file = f"{section}/{rank:05d}.safetensors"
            written.files[file] = write_tensors(folder / file, {n: part.tensor for n, part in own.items()})
            written.chunks[section] = {name: (file, part.box) for name, part in own.items()}
    if content.rank_content is not None:
        written.files.update(write_rank_files(folder, rank, content.rank_content))
    if content.train_state is not None and rank == 0:
        written.files[TRAIN_STATE_NAME] = write_bytes(folder / TRAIN_STATE_NAME, content.train_state)
    for name, data in content.settings.items() if rank == 0 else ():
        written.files[f"settings/{name}"] = write_bytes(folder / "settings" / name, data)
    return written


def _commit(
    temporary: Path, target: Path, content: FolderContent, everything: list[_Written], aside: Path | None
) -> None:
    files = {name: record for written in everything for name, record in written.files.items()}
    for name, record in files.items():
        status = (temporary / name).lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != record.size:
            raise CheckpointError(f"{name} has {status.st_size} bytes after writing {record.size}")
    stored = {section: _merge(section, tensors, everything) for section, tensors in content.sections.items()}
    manifest = Manifest(
        step=content.step,
        world_size=world_size(),
        mesh=content.mesh,
        metric=content.metric,
        files=dict(sorted(files.items())),
        model=stored.get("model"),
        ties=content.model.ties if content.model is not None else {},
        frozen=content.model.frozen if content.model is not None else [],
        extra=content.extra,
        optimizer=stored.get("optimizer"),
        optimizer_info=content.optimizer_info,
        versions=versions(),
    )
    for folder in temporary.iterdir():
        if folder.is_dir():
            sync_folder(folder)
    write_bytes(temporary / MANIFEST_NAME, encode_manifest(manifest))
    publish(temporary, target, aside=aside)


def _merge(section: str, tensors: Mapping[str, Any], everything: list[_Written]) -> dict[str, StoredTensor]:
    stored = {name: StoredTensor(tuple(t.shape), t.dtype, []) for name, t in sorted(tensors.items())}
    for written in everything:
        for name, chunk in written.chunks.get(section, {}).items():
            if name not in stored:
                raise CheckpointError(f"a rank has {name} in its {section}, rank 0 has not")
            stored[name].chunks.append(chunk)
    problems = tiling_problems(stored)
    if problems:
        raise CheckpointError(f"the ranks' parts do not make up {len(problems)} tensors: {problems[:3]}")
    return stored

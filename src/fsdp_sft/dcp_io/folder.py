"""Writing a folder of sharded tensors so that it is there complete or not at all, and opening such a folder.

A save takes three steps, and if one fails on any rank, all ranks raise and the folder is deleted:

1. Rank 0 makes a temporary folder beside the target (``new_folder_beside``).
2. Every rank writes its file into it, and forces it to the disk.
3. Rank 0 compares the sizes of all files, writes the index and the manifest, and renames the folder
   (``_commit``). The name appears last, so whatever has the name is complete.

A process that is killed at any time leaves a temporary folder, which the next save deletes, or the finished
one. What stood under the target's name before is as it was until the rename.
"""

import functools
import hashlib
import math
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_sft._agree import this_rank, through_rank_0, world_size
from fsdp_sft._boxes import Box, box_of, local_of
from fsdp_sft._disk import (
    Deferred,
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
from fsdp_sft.dcp_io.codec import MALFORMED, dumps, loads
from fsdp_sft.dcp_io.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    TRAIN_STATE_NAME,
    Manifest,
    describe,
    encode_index,
    encode_manifest,
    encode_tensors,
    parse,
    read_manifest,
    versions,
)
from fsdp_sft.dcp_io.rank_files import keys_of_rank
from fsdp_sft.dcp_io.shard_header import header_metadata
from fsdp_sft.dcp_io.sharding import Sharding, Shardings, one_rank
from fsdp_sft.dcp_io.stored import SHARDS, Derived, StoredTensor, file_key, missing_files, shard_file
from fsdp_sft.dcp_io.verify import file_problems
from fsdp_sft.distributed import mesh_of
from fsdp_sft.errors import CheckpointCorruptError, CheckpointError, SafetensorsError, abridged

_VISIBLE_SECONDS = 5.0  # a network file system may show a new folder to other machines late
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
class ReadTensor:
    """A tensor of another checkpoint, of which each rank reads its part when it is about to write it.

    Attributes:
        shape: Shape of the full tensor.
        dtype: Dtype of its elements.
        like: Live tensor that is sharded as this one is to be.
        read: Function that returns a box of the tensor, in CPU memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    like: torch.Tensor
    read: Callable[[Box], torch.Tensor]


@dataclass(frozen=True)
class FolderContent:
    """What a rank brings to a save. Tensors are the live ones, whole or sharded.

    Attributes:
        step: Number of the step, or None.
        mesh: Name and size of each axis of the mesh; see ``Manifest``.
        metric: Metric of the step; see ``Manifest``.
        model: Tensors of the model; None where an optimizer's state is saved alone.
        extra: Extra state of modules, as JSON by name; see ``Manifest``.
        extra_tensors: Tensors to which ``extra`` refers, by name.
        optimizer: Optimizer state by ``<fqn>/<state name>``, each a tensor, an ``OwnedTensor`` or a
            ``ReadTensor``; None if there is none.
        optimizer_info: Everything about the optimizer but tensors; see ``Manifest``.
        train_state: Bytes of ``train_state.json``; rank 0's are written.
        rank_content: State of this rank alone, as tensors by name.
        settings: Bytes of small files below ``settings/``, by name; rank 0's are written.
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
    rank_content: dict[str, torch.Tensor] | None = None
    settings: Mapping[str, bytes] = field(default_factory=dict)

    def with_own_copies(self) -> "FolderContent":
        """The same content with copies of ``rank_content``, which the caller may change from now on."""
        if self.rank_content is None:
            return self
        copies = {name: tensor.detach().clone() for name, tensor in self.rank_content.items()}
        copied = replace(self, rank_content=copies)
        vars(copied)["stored"] = self.stored  # else a thread would compute it again, and slow training down
        return copied

    @property
    def folders(self) -> list[str]:
        """Names of the folders to make inside the folder."""
        return [SHARDS, *(["settings"] if self.settings else [])]

    @property
    def sections(self) -> dict[str, Mapping[str, Any]]:
        """Tensors by name, of each section: the model and the optimizer."""
        found: dict[str, Mapping[str, Any]] = {}
        if self.model is not None:
            found["model"] = {**self.model.tensors, **self.extra_tensors}
        if self.optimizer is not None:
            found["optimizer"] = self.optimizer
        return found

    @functools.cached_property
    def stored(self) -> dict[str, dict[str, StoredTensor]]:
        """Which rank writes which part of each tensor, by section and name; the same on all ranks.

        Raises:
            CheckpointError: If two tensors would have the same name in the files.
        """
        shardings = Shardings(world_size())
        found: dict[str, dict[str, StoredTensor]] = {}
        for section, tensors in self.sections.items():
            found[section] = {
                name: _stored(section, name, tensors[name], index, shardings)
                for index, name in enumerate(sorted(tensors))
            }
            if len({tensor.key for tensor in found[section].values()}) != len(tensors):
                raise CheckpointError(f"two tensors of the {section} would have one name in the files")
        return found

    def manifest(self, stored: Mapping[str, dict[str, StoredTensor]]) -> Manifest:
        """The manifest without the records of the files, which are known only when these are written."""
        return Manifest(
            step=self.step,
            world_size=world_size(),
            mesh=self.mesh,
            metric=self.metric,
            model=stored.get("model"),
            ties=self.model.ties if self.model is not None else {},
            frozen=self.model.frozen if self.model is not None else [],
            extra=self.extra,
            optimizer=stored.get("optimizer"),
            optimizer_info=self.optimizer_info,
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
        box: Box of the full tensor that the part is.
        tensor: Values of the part: the live ones, a copy, or what is to be read.
    """

    box: Box
    tensor: torch.Tensor | Deferred


Parts = Mapping[str, Mapping[str, Part]]  # section -> tensor -> part


def _stored(section: str, name: str, tensor: Any, index: int, shardings: Shardings) -> StoredTensor:
    """A tensor as the manifest describes it; ``index`` is its number within the section."""
    if isinstance(tensor, OwnedTensor):
        sharding = one_rank(tensor.owner)
    else:
        sharding = shardings.of(tensor.like if isinstance(tensor, ReadTensor) else tensor)
    place = Derived(sharding, _copy(sharding, tensor, index))
    return StoredTensor(tuple(tensor.shape), tensor.dtype, file_key(section, name), place)


def _copy(sharding: Sharding, tensor: Any, index: int) -> int:
    """Number of the copy that is written of a tensor that several ranks have.

    Ranks with the same part take turns, from tensor to tensor, except for small tensors that all ranks have.
    A rank that loads opens the files of everything that it reads, and the counts of steps, one for each
    parameter, would otherwise be spread over as many files.
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


def new_folder_beside(target: Path, content: FolderContent, digests: list[str]) -> Path:
    """Make a temporary folder beside ``target`` for ``content``. Only rank 0 calls this.

    Args:
        target: Name that the folder will have when it is complete.
        content: What is to be written.
        digests: ``tensors_digest`` of each rank, in rank order.

    Raises:
        CheckpointError: If a rank has other tensors than rank 0, or the manifest could not be read again.
        ValueError: If the manifest would be too large to be read again.
    """
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise CheckpointError(
            f"{len(others)} ranks ({abridged(map(str, others))}) have tensors of other names, shapes, dtypes "
            "or placements than rank 0: all must save one model with one optimizer"
        )
    _refuse_unreadable(content)
    temporary = temporary_beside(target)
    for name in ("", *content.folders):
        (temporary / name).mkdir()
    return temporary


def _refuse_unreadable(content: FolderContent) -> None:
    """Parse the manifest as a load would do it, before anything is written.

    Raises:
        CheckpointError: If a load would refuse it.
        ValueError: If it would be too large.
    """
    encoded = encode_manifest(describe(content.manifest(content.stored)), b"")
    try:
        parse(loads(encoded, "it"), {})
    except MALFORMED as error:
        raise CheckpointError(f"what is to be saved could not be loaded again: {error}") from error


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
        target: Name of the finished folder; its parent must exist for rank 0.
        content: What this rank brings, with the same names on all ranks.
        aside: Name to which rank 0 moves what is at ``target``, just before the rename; None raises if there
            is something.
        parts: ``own_parts(content)`` or a copy of it; None takes the live values.
        temporary: Folder that ``new_folder_beside`` has made, passed on all ranks; None makes one.
        then: What rank 0 does when the folder has its name, while the other ranks wait.

    Raises:
        CheckpointError: If ranks do not share a file system, or a rank has another part of a tensor than its
            mesh and placements say.
        OSError: If writing fails on any rank. Nothing is left behind, and ``target`` is as it was.

    Collective: all ranks; all raise the same error.
    """
    if temporary is None:
        temporary = through_rank_0(
            f"creating a folder beside {target}",
            content.tensors_digest,
            lambda digests: new_folder_beside(target, content, digests),
        )
    place = temporary

    def write() -> dict[str, FileRecord]:
        _wait_until_visible(place)
        return _write_own(place, content, own_parts(content) if parts is None else parts)

    def commit(everything: list[dict[str, FileRecord]]) -> None:
        _commit(place, target, content, everything, aside)
        then()

    try:
        through_rank_0(f"writing {target.name}", write, commit)
    except BaseException:
        if this_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
        raise


def open_folder(folder: Path, *, hashes: bool) -> tuple[Manifest | None, list[str]]:
    """Read a folder's manifest on every rank, and check its files, each on one rank.

    Args:
        folder: The folder.
        hashes: Whether to compare the files' checksums, for which all of them are read.

    Returns:
        (manifest, or None if the folder is not sound; problems that any rank found, the same on all ranks).

    Collective: all ranks.
    """
    manifest: Manifest | None = None

    def look() -> tuple[list[str], str | None]:
        nonlocal manifest
        try:
            manifest = read_manifest(folder)
        except CheckpointCorruptError as error:
            return [str(error)], None
        # Largest first, dealt out like cards, so that ranks have about the same number of bytes to read.
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


def check_files(
    manifest: Manifest, stored: Mapping[str, StoredTensor], tensors: Mapping[str, torch.Tensor | None]
) -> None:
    """Check that the manifest lists every file that this rank will read.

    Args:
        manifest: The manifest.
        stored: Stored tensors by name.
        tensors: Tensors that are read into, by name, of which this rank reads its part; None reads all parts.

    Raises:
        CheckpointCorruptError: If a file is not listed.
    """
    for name, tensor in tensors.items():
        wanted = None if tensor is None else box_of(tensor)
        missing = missing_files(stored[name], wanted, manifest.files)
        if missing:
            raise CheckpointCorruptError(f"{name} has parts in {abridged(missing)}, which is not listed")


def read_tensors(reader: TensorReader, stored: Mapping[str, StoredTensor], tensors: Tensors) -> None:
    """Fill this rank's part of each of ``tensors`` from the files."""
    for name, tensor in tensors.items():
        box, source = box_of(tensor), stored[name]
        if box.numel:
            read_into(reader, source.key, source.parts(box), box, local_of(tensor))


def _wait_until_visible(folder: Path) -> None:
    """Wait until this rank sees the folder that rank 0 has made; raise if it does not appear."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank {this_rank()} does not see {folder}, which rank 0 has made: all ranks must write to "
                "one shared file system; choose a folder on it, by an absolute path"
            )
        time.sleep(0.05)


def own_parts(content: FolderContent) -> Parts:
    """The live parts that this rank writes. Replicas take turns, so that each part is written once."""
    own = shard_file(this_rank())
    return {
        section: _parts_of(content.sections[section], stored, own)
        for section, stored in content.stored.items()
    }


def _parts_of(tensors: Mapping[str, Any], stored: Mapping[str, StoredTensor], file: str) -> dict[str, Part]:
    """The parts of a section's tensors that lie in this rank's file, by name."""
    parts: dict[str, Part] = {}
    for name, entry in stored.items():
        box = entry.part_in(file)
        if box is None:
            continue
        live = tensors[name]
        if isinstance(live, ReadTensor):
            parts[name] = Part(box, Deferred(box.shape, live.dtype, partial(live.read, box)))
            continue
        local = live.tensor if isinstance(live, OwnedTensor) else local_of(live)
        if local is None or tuple(local.shape) != box.shape:
            found = None if local is None else tuple(local.shape)
            raise CheckpointError(
                f"rank {this_rank()} has {found} of {name}; its mesh and placements give it {box.shape}"
            )
        parts[name] = Part(box, local)
    return parts


def _write_own(folder: Path, content: FolderContent, parts: Parts) -> dict[str, FileRecord]:
    """Write everything that this rank writes; records of its files by name.

    The small files come first: the header of rank 0's file has their records, so that a lost manifest can be
    made again (``rebuild``).
    """
    rank = this_rank()
    stored = content.stored
    written: dict[str, FileRecord] = {}
    tensors: dict[str, torch.Tensor | Deferred] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    offsets: dict[str, tuple[int, ...]] = {}
    for section, own in parts.items():
        for name, part in own.items():
            key = stored[section][name].key
            tensors[key], offsets[key] = part.tensor, part.box.offset
            shapes[key] = stored[section][name].shape
    if content.rank_content is not None:
        for key, tensor in keys_of_rank(rank, content.rank_content).items():
            tensors[key], offsets[key], shapes[key] = tensor, (0,) * tensor.ndim, tuple(tensor.shape)
    if content.train_state is not None and rank == 0:
        written[TRAIN_STATE_NAME] = write_bytes(folder / TRAIN_STATE_NAME, content.train_state)
    for name, data in content.settings.items() if rank == 0 else ():
        written[f"settings/{name}"] = write_bytes(folder / "settings" / name, data)
    if tensors or rank == 0:
        description = describe(content.manifest(stored)) if rank == 0 else None
        metadata = header_metadata(content.step, world_size(), rank, offsets, shapes, description, written)
        try:
            written[shard_file(rank)] = write_tensors(folder / shard_file(rank), tensors, metadata)
        except SafetensorsError as error:
            raise CheckpointError(
                f"rank {rank} has {len(tensors)} tensors, whose names and shapes are more than a file can "
                f"begin with: {error}; has rank_state very many tensors?"
            ) from error
    return written


def _commit(
    temporary: Path,
    target: Path,
    content: FolderContent,
    everything: list[dict[str, FileRecord]],
    aside: Path | None,
) -> None:
    """Write index and manifest, and let the folder appear under its name. Only rank 0 calls this.

    Args:
        temporary: Folder into which all ranks have written.
        target: Name that it gets.
        content: What was written.
        everything: Records of the files of each rank, in rank order.
        aside: See ``write_folder``.
    """
    files = {name: record for written in everything for name, record in written.items()}
    # Whether rank 0 sees the other ranks' files, and at their full size: otherwise ranks do not share a file
    # system, or a file system has lost what it acknowledged.
    for name, record in files.items():
        status = (temporary / name).lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != record.size:
            raise CheckpointError(f"{name} has {status.st_size} bytes after writing {record.size}")
    # The order is what makes a step crash-safe. Ranks have forced the contents of their files to the disk
    # before they returned their records. Now follow: the names of these files (fsync of the folders inside);
    # the index and the manifest, which vouch for them (write_bytes ends with an fsync); and in `publish` the
    # names of these two, the rename, and the name of the step. After a loss of power in between there is a
    # folder without its final name, which the next save deletes. If the rename came earlier, the step could
    # have its name while a file is still empty, since file systems may write names before contents.
    index = encode_index(files)
    for folder in temporary.iterdir():
        if folder.is_dir():
            sync_folder(folder)
    write_bytes(temporary / INDEX_NAME, index)
    write_bytes(temporary / MANIFEST_NAME, encode_manifest(describe(content.manifest(content.stored)), index))
    publish(temporary, target, aside=aside)

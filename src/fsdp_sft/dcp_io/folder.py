"""Writing a folder of sharded tensors, which appears complete or not at all, and opening such a folder.

A save takes three steps, and if one fails on any rank, all ranks raise and the folder is deleted:

1. Rank 0 makes a temporary folder beside the target (``new_folder_beside``).
2. Every rank writes its file into it, and forces it to the disk.
3. Rank 0 compares the sizes of all files, writes the manifest, and renames the folder (``_commit``). The name
   appears last, so whatever has the name is complete.

A process that is killed leaves a temporary folder, which the next save deletes, or the finished one. Until
the rename, what was at the target before is unchanged.
"""

import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fsdp_sft._process.bounds import parse_json
from fsdp_sft._process.codec import MALFORMED
from fsdp_sft._ranks.agree import agreed, this_rank, world_size
from fsdp_sft._tensors.boxes import box_of, local_of
from fsdp_sft._tensors.disk import (
    FileRecord,
    check_room,
    file_problem,
    publish,
    sync_folder,
    temporary_beside,
    unsound_beside,
    write_bytes,
    write_tensors,
)
from fsdp_sft._tensors.reader import do_reads, threads_that_read
from fsdp_sft._tensors.safetensors import num_bytes
from fsdp_sft._tensors.stored import Read, StoredFolder, file_header
from fsdp_sft.dcp_io.manifest import MANIFEST_NAME, Manifest, encode_manifest, parse, read_manifest
from fsdp_sft.dcp_io.parts import RANK, SHARDS, Part, StoredTensor, header_metadata, placed_in, shard_file
from fsdp_sft.errors import CheckpointCorruptError, CheckpointError, abridged

_VISIBLE_SECONDS = 5.0  # a network file system may show a new folder to other machines late


def new_folder_beside(target: Path, manifest: Manifest, digests: list[str]) -> Path:
    """Make a temporary folder beside ``target`` for what ``manifest`` describes. Only rank 0 calls this.

    Args:
        target: Name that the folder will have when it is complete.
        manifest: What is to be written.
        digests: Digest of names, shapes, dtypes and shardings of each rank, in rank order.

    Raises:
        CheckpointError: If a rank has other tensors than rank 0, or the manifest could not be read again.
        ValueError: If the manifest would be too large to be read again.
        OSError: If the file system has less room than the tensors take.
    """
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise CheckpointError(
            f"{len(others)} ranks ({abridged(map(str, others))}) have tensors of other names, shapes, dtypes "
            "or placements than rank 0: all must save one model with one optimizer"
        )
    encoded = encode_manifest(manifest)
    try:
        parse(parse_json(encoded, "it"))  # as a load would do it
    except MALFORMED as error:
        raise CheckpointError(f"what is to be saved could not be loaded again: {error}") from error
    need = sum(num_bytes(tensor.dtype, tensor.shape) for tensor in manifest.tensors)
    check_room(target.parent, need, f"saving {target}")
    temporary = temporary_beside(target)
    (temporary / SHARDS).mkdir(parents=True)
    return temporary


def write_folder(
    temporary: Path,
    target: Path,
    manifest: Manifest,
    parts: Sequence[Part],
    then: Callable[[], None],
) -> None:
    """Write a step into a temporary folder, and rename it when it is complete.

    Args:
        temporary: Folder that ``new_folder_beside`` has made.
        target: Name of the finished folder. What is there already is moved aside just before the rename.
        manifest: What is written; its tensors are the same on all ranks.
        parts: What this rank writes of the tensors, and its own state.
        then: Called on rank 0 after the rename, while the other ranks wait.

    Raises:
        CheckpointError: If ranks do not share a file system.
        OSError: If writing fails on any rank; ``target`` is as it was, and nothing is left beside it. If only
            forcing the finished folder's name to the disk fails, the sound folder is at ``target``.

    Collective: all ranks; all raise the same error.
    """

    def commit(records: list[FileRecord]) -> None:
        _commit(temporary, target, manifest, records)
        then()

    try:
        with agreed(f"writing {target.name}", commit) as decision:
            _wait_until_visible(temporary)
            decision.told = _write_own(temporary, manifest, parts)
    except BaseException:
        if this_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
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

    def merge(found: list[tuple[list[str], str | None]]) -> list[str]:
        merged = list(dict.fromkeys(problem for own, _ in found for problem in own))
        if not merged and len({digest for _, digest in found}) != 1:
            merged = [f"ranks see different files at {folder}; all of them must share its file system"]
        return merged

    manifest: Manifest | None = None
    with agreed(f"checking {folder}", merge) as decision:
        manifest, problems = examine(folder, hashes=hashes, share=slice(this_rank(), None, world_size()))
        decision.told = problems, manifest and manifest.digest
    return (None if decision.result else manifest), decision.result


def read_tensors(
    folder: StoredFolder, stored: Mapping[str, StoredTensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Fill this rank's part of each of ``tensors`` from the files."""
    reads: list[Read] = []
    for name, tensor in tensors.items():
        box, source = box_of(tensor), stored[name]
        if box.numel:
            reads += folder.reads(source.key, source.parts(box), box, local_of(tensor))
    do_reads(reads, workers=threads_that_read(), damaged=CheckpointCorruptError)


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


def _write_own(folder: Path, manifest: Manifest, parts: Sequence[Part]) -> FileRecord:
    """Write this rank's file; its record."""
    rank = this_rank()
    metadata = header_metadata(manifest.step, manifest.world_size, rank, parts)
    return write_tensors(folder / shard_file(rank), {part.name: part.local for part in parts}, metadata)


def _commit(temporary: Path, target: Path, manifest: Manifest, records: list[FileRecord]) -> None:
    """Write the manifest, and give the folder its final name. Only rank 0 calls this.

    Args:
        temporary: Folder into which all ranks have written.
        target: The final name.
        manifest: What was written.
        records: Record of the file of each rank, in rank order.
    """
    files = {shard_file(rank): record for rank, record in enumerate(records)}
    # If rank 0 does not see a file at its full size, ranks do not share a file system, or it has lost what it
    # acknowledged.
    for name, record in files.items():
        status = (temporary / name).lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != record.size:
            raise CheckpointError(f"{name} has {status.st_size} bytes after writing {record.size}")
    # The order makes a step crash-safe. Ranks forced the contents of their files to the disk before they
    # returned their records. Now follow the names of these files (fsync of the folder inside); the manifest,
    # which vouches for them (write_bytes ends with an fsync); and in `publish` the manifest's name, the
    # rename, and the name of the step. A loss of power in between leaves a folder without its final name,
    # which the next save deletes. If the rename came earlier, the step could have its name while a file is
    # still empty, since file systems may write names before contents.
    sync_folder(temporary / SHARDS)
    write_bytes(temporary / MANIFEST_NAME, encode_manifest(replace(manifest, files=files)))
    publish(temporary, target, aside=unsound_beside(target))


# Comparison of a checkpoint's files with its manifest.


def examine(
    folder: Path, *, hashes: bool, headers: bool = True, share: slice = slice(None)
) -> tuple[Manifest | None, list[str]]:
    """Read a folder's manifest, and compare its files with it, in this process alone.

    Args:
        folder: Folder of the checkpoint.
        hashes: Whether to read the files and compare checksums.
        headers: Whether to compare the tensors that the headers name.
        share: Which files to compare, of all by size.

    Returns:
        (manifest, or None if it is not sound; problems, each of which names its file).
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointCorruptError as error:
        return None, [str(error)]
    # Largest first, so that ranks that take turns have about the same number of bytes to read.
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    problems = []
    for name in by_size[share]:
        problem = file_problem(folder, name, manifest.files[name], hashes=hashes)
        if problem is None and headers:
            problem = _header_problem(folder, name, manifest)
        if problem is not None:
            problems.append(f"{folder.name}/{name} {problem}")
    return manifest, problems


def _header_problem(folder: Path, name: str, manifest: Manifest) -> str | None:
    """How the header of a file differs from the manifest; None if it does not."""
    rank = int(Path(name).stem)
    try:
        header = file_header(folder / name, CheckpointCorruptError)
        whose, placed = placed_in(header.metadata)
        found = {
            key: (entry.dtype, entry.shape, *placed[key])
            for key, entry in header.entries.items()
            if not key.startswith(RANK)
        }
    except CheckpointCorruptError as error:
        return f"is not sound: {error}"
    except MALFORMED as error:
        return f"does not say what it is ({error!r})"
    if whose != (rank, manifest.world_size, manifest.step):
        return "is of another rank or checkpoint"
    boxes = [(tensor, tensor.part_of_rank(rank)) for tensor in manifest.tensors]
    if found != {t.key: (t.dtype, box.shape, t.shape, box.offset) for t, box in boxes if box is not None}:
        return "holds other tensors than the manifest says"
    return None

"""Comparison of a checkpoint's files with its manifest."""

from collections.abc import Sequence
from pathlib import Path

from fsdp_sft._process.codec import MALFORMED
from fsdp_sft._tensors.disk import file_problem
from fsdp_sft._tensors.stored import file_header
from fsdp_sft.dcp_io.manifest import Manifest, read_manifest
from fsdp_sft.dcp_io.rank_files import is_of_a_rank
from fsdp_sft.dcp_io.shard_header import placed_in, rank_in
from fsdp_sft.dcp_io.stored import SHARDS, expected_in, missing_files, rank_of
from fsdp_sft.errors import CheckpointCorruptError


def file_problems(
    folder: Path, manifest: Manifest, names: Sequence[str], *, hashes: bool, headers: bool = True
) -> list[str]:
    """How some of a checkpoint's files differ from the manifest; empty if they do not.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        names: Names of the files to compare.
        hashes: Whether to read the files and compare checksums.
        headers: Whether to compare the tensors that the headers name.
    """
    problems = []
    for name in names:
        problem = file_problem(folder, name, manifest.files[name], hashes=hashes)
        if problem is None and headers and name.startswith(f"{SHARDS}/"):
            problem = _header_problem(folder, name, manifest)
        if problem is not None:
            problems.append(f"{folder.name}/{name} {problem}")
    return problems


def verify_folder(folder: Path, *, hashes: bool) -> list[str]:
    """All problems of a checkpoint's folder, found by this process alone."""
    try:
        manifest = read_manifest(folder)
    except CheckpointCorruptError as error:
        return [str(error)]
    problems = [
        f"{folder.name}/{name} has parts of tensors and is not listed" for name in unlisted_files(manifest)
    ]
    return problems + file_problems(folder, manifest, list(manifest.files), hashes=hashes)


def unlisted_files(manifest: Manifest) -> list[str]:
    """Files that must have a part of some tensor but are not in the index."""
    # Tensors of one shape and sharding have their parts in the same files: one of them stands for all.
    alike = {(tensor.shape, tensor.sharding, tensor.copy): tensor for tensor in manifest.tensors}
    found = {file for tensor in alike.values() for file in missing_files(tensor, None, manifest.files)}
    return sorted(found)


def _header_problem(folder: Path, name: str, manifest: Manifest) -> str | None:
    """How the header of a file differs from the manifest; None if it does not."""
    try:
        header = file_header(folder / name, CheckpointCorruptError)
    except CheckpointCorruptError as error:
        return f"is not sound: {error}"
    try:
        about, placed = rank_in(header.metadata), placed_in(header.metadata)
    except MALFORMED as error:
        return f"does not say what it is ({error!r})"
    if about != (rank_of(name), manifest.world_size, manifest.step):
        return "is of another rank or checkpoint"
    found = {key: (e.dtype, e.shape) for key, e in header.entries.items() if not is_of_a_rank(key)}
    if found != expected_in(name, manifest.tensors):
        return "holds other tensors than the manifest says"
    for tensor in manifest.tensors:
        box = tensor.part_in(name)
        if box is not None and placed.get(tensor.key) != (tensor.shape, box.offset):
            return f"has another part of {tensor.key} than the manifest says"
    return None

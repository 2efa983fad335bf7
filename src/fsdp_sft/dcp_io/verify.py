"""Whether a checkpoint's files are what its manifest says."""

from collections.abc import Sequence
from pathlib import Path

from fsdp_sft._disk import TensorReader, file_problem
from fsdp_sft.dcp_io.manifest import LISTING_VERSIONS, Manifest, read_manifest
from fsdp_sft.dcp_io.rank_files import is_of_a_rank
from fsdp_sft.dcp_io.stored import SHARDS, expected_in, missing_files
from fsdp_sft.errors import CheckpointCorruptError


def file_problems(
    folder: Path, manifest: Manifest, names: Sequence[str], *, hashes: bool, headers: bool = True
) -> list[str]:
    """How some of a checkpoint's files differ from what the manifest says; empty if they do not.

    Args:
        folder: Of the checkpoint.
        manifest: Its manifest.
        names: Of the files to look at.
        hashes: Whether to read them and compare checksums.
        headers: Whether to compare the tensors that their headers name.
    """
    problems = []
    for name in names:
        problem = file_problem(folder, name, manifest.files[name], hashes=hashes)
        if problem is None and headers and name.startswith((f"{SHARDS}/", "model/", "optimizer/")):
            problem = _header_problem(folder, name, manifest)
        if problem is not None:
            problems.append(f"{folder.name}/{name} {problem}")
    return problems


def verify_folder(folder: Path, *, hashes: bool) -> list[str]:
    """All problems of a checkpoint folder, looked at by this process alone."""
    try:
        manifest = read_manifest(folder)
    except CheckpointCorruptError as error:
        return [str(error)]
    problems = [
        f"{folder.name}/{name} has parts of tensors and is not listed" for name in _unlisted(manifest)
    ]
    return problems + file_problems(folder, manifest, list(manifest.files), hashes=hashes)


def _unlisted(manifest: Manifest) -> list[str]:
    """Files that must have parts of some tensor, and are not in the index; tensors that lie alike are one."""
    alike = {(tensor.shape, tensor.place): tensor for tensor in manifest.tensors}
    found = {file for tensor in alike.values() for file in missing_files(tensor, None, manifest.files)}
    return sorted(found)


def _header_problem(folder: Path, name: str, manifest: Manifest) -> str | None:
    tensors = manifest.tensors
    if manifest.version in LISTING_VERSIONS:  # a file has one section, and both may have the same names
        section = manifest.model if name.startswith("model/") else manifest.optimizer
        tensors = list((section or {}).values())
    try:
        with TensorReader(folder) as reader:
            entries = reader.header(name).entries
    except CheckpointCorruptError as error:
        return f"is not sound: {error}"
    found = {key: (entry.dtype, entry.shape) for key, entry in entries.items() if not is_of_a_rank(key)}
    if found != expected_in(name, tensors):
        return "holds other tensors than the manifest says"
    return None

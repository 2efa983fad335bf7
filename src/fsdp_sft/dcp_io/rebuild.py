"""Rebuilding a lost or damaged manifest from the headers of the shards' files."""

import hashlib
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_sft._codec import MALFORMED, loads
from fsdp_sft._disk import FileRecord, TensorReader, closing, full_path, read_bytes, sync_folder, write_bytes
from fsdp_sft._limits import blame_no_file
from fsdp_sft._safetensors import open_file
from fsdp_sft.dcp_io.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    MAX_JSON_BYTES,
    checked_body,
    encode_index,
    encode_manifest,
    parse,
    read_manifest,
)
from fsdp_sft.dcp_io.shard_header import beside_in, described_in
from fsdp_sft.dcp_io.steps import step_number
from fsdp_sft.dcp_io.stored import SHARDS, shard_file
from fsdp_sft.dcp_io.verify import header_problem, unlisted_files
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    SafetensorsError,
    abridged,
)


def rebuild_manifest(folder: str | os.PathLike[str]) -> bool:
    """Write the manifest and the index of a step again, from the headers of its files.

    Every file is read once. If no file has changed, the result is byte for byte what the save wrote. Call it
    from one process, while no other uses the folder.

    Args:
        folder: Folder of one step, of format version 3.

    Returns:
        Whether the files were compared with the checksums of the save, for which the index must still be
        there. Without it they are taken as they are.

    Raises:
        CheckpointNotFoundError: If there is no step of format version 3.
        CheckpointExistsError: If the manifest is sound.
        CheckpointCorruptError: If a file is missing, contradicts the other files, or has other contents than
            the index says. Nothing is written then.
    """
    step = full_path(folder)
    if not (step / SHARDS).is_dir():
        raise CheckpointNotFoundError(f"there is no step of format version 3 at {step}: it has no {SHARDS}/")
    if _is_sound(step):
        raise CheckpointExistsError(f"the manifest of {step} is sound; there is nothing to rebuild")
    description, headers, beside = _read_headers(step)
    index = {name: _record(step / name) for name in (*headers, *beside)}
    known = _old_index(step)
    changed = [name for name, record in beside.items() if index[name] != record]
    if changed:
        raise CheckpointCorruptError(
            f"{step}: {abridged(changed)} have changed; more than the manifest is lost"
        )
    if known is not None:
        changed = [name for name, record in known.items() if index.get(name) != record]
        if changed:
            raise CheckpointCorruptError(
                f"{step}: {abridged(changed)} are not what {INDEX_NAME} says; more than the manifest is lost"
            )
        index = {name: index[name] for name in known}
    encoded = encode_index(index)
    manifest = _checked(step, description, encoded, index, headers)
    _replace(step / INDEX_NAME, encoded)
    _replace(step / MANIFEST_NAME, manifest)
    sync_folder(step)
    return known is not None


def _is_sound(step: Path) -> bool:
    """Whether a step has a sound manifest."""
    try:
        read_manifest(step)
    except CheckpointCorruptError:
        return False
    return True


def _read_headers(step: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, FileRecord]]:
    """The manifest's contents from rank 0's file, each file's header, and records of rank 0's other files."""
    names = (path.name for path in (step / SHARDS).iterdir())
    files = sorted(f"{SHARDS}/{name}" for name in names if re.fullmatch(r"\d{5,}\.safetensors", name))
    if shard_file(0) not in files:
        raise CheckpointCorruptError(
            f"{step / shard_file(0)} is missing: what the manifest says beside the tensors is there alone"
        )
    with TensorReader(step) as reader:
        headers = {file: reader.header(file) for file in files}
    try:
        description = described_in(headers[shard_file(0)].metadata)
        if description is None:
            raise CheckpointCorruptError(
                f"{step / shard_file(0)} has no copy of the manifest, which was too large for one"
            )
        own_step = int(description["step"])
        beside = beside_in(headers[shard_file(0)].metadata)
    except MALFORMED as error:
        raise CheckpointCorruptError(f"{step / SHARDS} has files of another kind: {error!r}") from None
    if step_number(step) not in (None, own_step):
        raise CheckpointCorruptError(f"{step} has the files of step {own_step}")
    return description, headers, beside


def _record(path: Path) -> FileRecord:
    """Size and SHA-256 of a file, which is read for them."""
    try:
        fd = open_file(path)
    except (OSError, SafetensorsError) as error:
        blame_no_file(error, path)
        state = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise CheckpointCorruptError(f"{path} {state}; more than the manifest is lost") from None
    with closing(fd), os.fdopen(fd, "rb", closefd=False) as file:
        return FileRecord(os.fstat(fd).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _old_index(step: Path) -> dict[str, FileRecord] | None:
    """The records of the index; None if there is none, or it cannot be read."""
    try:
        raw = loads(read_bytes(step / INDEX_NAME, MAX_JSON_BYTES), INDEX_NAME)
        return {str(name): FileRecord(int(size), str(digest)) for name, (size, digest) in raw.items()}
    except (CheckpointCorruptError, *MALFORMED):
        return None


def _checked(
    step: Path,
    description: Mapping[str, Any],
    encoded: bytes,
    index: Mapping[str, FileRecord],
    headers: Mapping[str, Any],
) -> bytes:
    """The bytes of the manifest, after checking that a load would accept it and that the files fit it.

    Args:
        step: Folder of the step, for errors.
        description: The manifest without the files.
        encoded: Bytes of the index.
        index: Records of the files.
        headers: Headers of the shards' files.
    """
    try:
        written = encode_manifest(description, encoded)
        body = checked_body(written)
        manifest = parse(body, {n: {"size": r.size, "sha256": r.sha256} for n, r in index.items()})
        found = {file: header_problem(file, header, manifest) for file, header in headers.items()}
    except MALFORMED as error:
        raise CheckpointCorruptError(f"{step}: the headers are not what they should be ({error!r})") from None
    problems = [f"{file} {problem}" for file, problem in found.items() if problem is not None]
    problems += [f"{file} is missing" for file in unlisted_files(manifest)]
    if problems:
        raise CheckpointCorruptError(f"{step} is not complete: {abridged(problems, '; ')}")
    return written


def _replace(path: Path, data: bytes) -> None:
    """Write a small file under a temporary name, and rename it over the old one."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        write_bytes(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

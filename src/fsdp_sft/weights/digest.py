"""A fingerprint of a checkpoint that can be taken without reading all of it."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from fsdp_sft._quantised.settings import CONFIG, OTHER_FILES
from fsdp_sft._tensors.disk import closing
from fsdp_sft._tensors.safetensors import open_file, read_at
from fsdp_sft.weights.prepared_note import FORMAT_VERSION
from fsdp_sft.weights.resolve import find_manifest, resolved_inside, weight_file_names

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
_HASH_NAME = re.compile(r"[0-9a-f]{64}")


def source_digest(
    source: Path,
    master_dtype: torch.dtype,
    missing: str,
    remote: bool,
    allow_pickle: bool,
    check_finite: bool = True,
) -> str:
    """SHA-256 of everything that prepared tensors depend on; the source's path and the user do not count.

    Args:
        source: Folder of the checkpoint.
        master_dtype: Dtype of the prepared shards.
        missing: See ``load_weights``.
        remote: Whether the checkpoint's own code is used, whose files then count too.
        allow_pickle: See ``load_weights``.
        check_finite: See ``load_weights``.
    """
    import transformers

    described: list[Any] = [FORMAT_VERSION, str(master_dtype), missing, remote, check_finite]
    described += [torch.__version__, transformers.__version__]
    names = weight_file_names(source, allow_pickle=allow_pickle)
    small = [CONFIG, "generation_config.json", *OTHER_FILES, find_manifest(source, allow_pickle=allow_pickle)]
    small += [path.name for path in sorted(source.glob("*.py"))] if remote else []
    there = [name for name in dict.fromkeys(small) if name not in names and (source / name).exists()]
    described += [
        [name, hashlib.sha256(resolved_inside(source, name).read_bytes()).hexdigest()] for name in there
    ]
    described += [[name, *_file_digest(resolved_inside(source, name))] for name in names]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _file_digest(path: Path) -> list[Any]:
    """Identity of a weight file's contents: the Hub's checksum, or size, modification time and samples.

    Reading all of a checkpoint of hundreds of gigabytes would take minutes at every start.
    """
    if _HASH_NAME.fullmatch(path.name):
        return [path.name]  # the Hub's cache names a file by the SHA-256 of its contents
    fd = open_file(path)
    with closing(fd):
        status = os.fstat(fd)
        hashed = hashlib.sha256()
        length = min(_SAMPLE_BYTES, status.st_size)
        for sample in range(_SAMPLES):
            piece = bytearray(length)
            read_at(fd, (status.st_size - length) * sample // (_SAMPLES - 1), memoryview(piece))
            hashed.update(piece)
    return [status.st_size, status.st_mtime_ns, hashed.hexdigest()]

"""The key of an encoding: equal for the same data, template, tokenizer, options and versions."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_sft._compat import data, tokenizers
from fsdp_sft._tensors.disk import read_bytes
from fsdp_sft.collate.encoded.source import RowSource, row_bytes
from fsdp_sft.collate.options import EncodeOptions
from fsdp_sft.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 1
_READ_BYTES = 8 << 20


def key_of(
    source: RowSource, tokenizer: PreTrainedTokenizerBase, options: EncodeOptions, on_error: str, cache: Path
) -> str:
    """A digest of everything that the encoded rows depend on."""
    # The rules for labels change with the library's version.
    from fsdp_sft import __version__

    backend = getattr(tokenizer, "backend_tokenizer", None)
    about = {
        "format": FORMAT_VERSION,
        "versions": [__version__, *tokenizers.versions_of_tokenizers()],
        "data": data_digest(source, cache),
        "tokenizer": hashlib.sha256(backend.to_str().encode()).hexdigest()
        if backend is not None
        else repr(tokenizer),
        "special": sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items()),
        "splits special tokens": getattr(tokenizer, "split_special_tokens", None),
        "templates": tokenizer.chat_template,
        "on_error": on_error,
        **{
            key: sorted(value) if isinstance(value, frozenset) else value
            for key, value in asdict(options).items()
        },
    }
    return hashlib.sha256(json.dumps(about, default=repr).encode()).hexdigest()


def data_digest(source: RowSource, cache: Path) -> str:
    """A digest of all rows; unchanged files are not read again."""
    if source.paths:
        return "-".join(_file_digest(path, cache) for path in source.paths)
    fingerprint = data.dataset_fingerprint(source.rows)
    if fingerprint is not None:
        return f"fingerprint {fingerprint}"
    digest = hashlib.sha256()
    for row in source.rows:
        content = row_bytes(row)
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _file_digest(path: Path, cache: Path) -> str:
    """A digest of a file's contents, cached by its path, size, times of change and inode."""
    status = path.stat()
    state = [str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    known = cache / f".digest-{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]}"
    with suppress(CheckpointCorruptError):  # it is not there, or no file of ours
        told = read_bytes(known, 64)
        if re.fullmatch(rb"[0-9a-f]{64}", told):
            return told.decode()
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    # A name that nobody can guess, and no link: others may write into the folder.
    temporary = known.with_name(f"{known.name}.{uuid.uuid4().hex}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(fd, "w") as out:
        out.write(digest.hexdigest())
    with suppress(OSError):  # a folder of that name
        temporary.replace(known)
    temporary.unlink(missing_ok=True)
    return digest.hexdigest()

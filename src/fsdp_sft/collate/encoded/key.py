"""The key of an encoding: equal for the same data, template, tokenizer, options and versions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_sft._compat import data, tokenizers
from fsdp_sft.collate.encoded.source import RowSource, row_bytes
from fsdp_sft.collate.options import EncodeOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 1


def key_of(
    source: RowSource, tokenizer: PreTrainedTokenizerBase, options: EncodeOptions, on_error: str
) -> str:
    """A digest of everything that the encoded rows depend on."""
    # The rules for labels change with the library's version.
    from fsdp_sft import __version__

    backend = getattr(tokenizer, "backend_tokenizer", None)
    about = {
        "format": FORMAT_VERSION,
        "versions": [__version__, *tokenizers.versions_of_tokenizers()],
        "data": data_digest(source),
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


def data_digest(source: RowSource) -> str:
    """A digest of all rows."""
    if source.paths:
        return "-".join(map(_file_digest, source.paths))
    fingerprint = data.dataset_fingerprint(source.rows)
    if fingerprint is not None:
        return f"fingerprint {fingerprint}"
    digest = hashlib.sha256()
    for row in source.rows:
        content = row_bytes(row)
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    """A digest of a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

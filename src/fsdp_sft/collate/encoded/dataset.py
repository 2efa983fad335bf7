"""`encode_dataset`: which rank encodes, which ranks wait, and whether an encoding exists already."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
import uuid
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock
from typing_extensions import Unpack

from fsdp_sft._compat import data, tokenizers
from fsdp_sft._model.wrappers import tokenizer_of
from fsdp_sft._ranks.agree import agree_on, agreed, all_gather_objects, share, this_rank, while_others_wait
from fsdp_sft._tensors.disk import full_path, publish, sweep, temporary_beside, unsound_beside
from fsdp_sft.collate.encoded.build import Work, build, look_first, num_refused, refusal
from fsdp_sft.collate.encoded.source import JsonLines, row_bytes, rows_to_read
from fsdp_sft.collate.encoded.store import EncodedDataset, is_sound
from fsdp_sft.collate.filtering import warn_of_notes
from fsdp_sft.collate.notes import NOTES, WARNED_OF_ROWS, WARNED_OF_TEMPLATES
from fsdp_sft.collate.options import EncodeKeywords, EncodeOptions, check_choice, check_count, options_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOOKED_AT_FIRST = 500
_FORMAT_VERSION = 2
_SEEN_SECONDS = 5.0  # time in which a network file system must show another node a new file


def encode_dataset(
    rows: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    num_proc: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    on_error: Literal["raise", "count"] = "count",
    on_dropped: Literal["error", "count", "ignore"] = "count",
    max_refused: float = 0.01,
    **options: Unpack[EncodeKeywords],
) -> EncodedDataset:
    """Tokenise rows once, into files that every rank memory-maps.

    Rows without a target are left out and counted, as in `filter_rows`. An existing encoding of the same
    data, template, tokenizer, options and versions is opened at once, and the warnings about its rows are
    repeated. A folder gets its name only when it is complete: a killed job leaves nothing that is used, and
    the next one starts over.

    Ranks that see the same ``cache_dir`` share one encoding, which rank 0 and its processes make while the
    others wait. On nodes that do not see rank 0's ``cache_dir``, the first rank of each makes one.

    Args:
        rows: A sequence of rows as `encode_chat` takes them, a ``datasets.Dataset``, or the path of a
            ``.jsonl`` file or a list of such paths, which are read row by row. The same on all ranks.
        tokenizer: A fast tokenizer.
        max_length: Most tokens of a row.
        num_proc: Number of processes that encode; None takes one for each core, but no more than there is
            work for.
        cache_dir: Folder that holds encoded data; None is ``fsdp-sft/encoded`` in ``$XDG_CACHE_HOME`` or
            ``~/.cache``.
        on_error: "count" drops and counts rows that `encode_chat` would refuse, "raise" stops at the first.
        on_dropped: What to do with a row if the template leaves out a text of an answer, as in `filter_rows`.
        max_refused: Largest share of refused rows that does not raise. A finished encoding is kept, so that
            a second call with a larger share opens it.
        **options: Further options of `encode_chat`.

    Returns:
        A sequence of `EncodedChat`, with ``counts``, ``lengths`` and ``num_targets``.

    Raises:
        ValueError: If more rows are refused than ``max_refused`` allows, with the counts and an example of
            each reason: within seconds, from a sample of 500 rows, or at the end. According to the most
            frequent reason it is a `ChatTemplateError` or another `RowError`.
            Also for no rows, and for ranks with different numbers of rows.
        ChatTemplateError: If there is no chat template, or it does not parse.
        FileNotFoundError: If a file does not exist.
        OSError: If writing fails.

    Collective: all ranks; those that wait need no time-out longer than the default.
    Memory: In each process 256 rows, about a million tokens and, of a sequence that is no
        ``datasets.Dataset``, its share of the rows; pages of the files belong to the system.
    Disk: 8 bytes a token and 8 a row; up to twice that while it is made.

    Example:
        >>> encoded = fs.encode_dataset(rows, tokenizer, max_length=64, cache_dir="encoded")
        >>> len(encoded), dict(encoded.counts)
        (8, {'kept': 8})
    """
    tokenizer = tokenizer_of(tokenizer)
    wanted = options_of("encode_dataset", options, max_length=max_length, on_dropped=on_dropped)
    check_count("max_length", max_length)
    check_choice("on_error", on_error, ("raise", "count"))
    if num_proc is not None:
        check_count("num_proc", num_proc)
    if not 0 <= max_refused <= 1:
        raise ValueError(f"max_refused must be a share of 0 to 1, got {max_refused!r}")
    cache = _cache_folder(cache_dir)
    work = Work(tokenizer, wanted, on_error == "raise")
    with agreed("looking at the rows to encode"):
        source = rows_to_read(rows)
        cache.mkdir(parents=True, exist_ok=True)
    agree_on("encoding", **{"number of rows": len(source)})
    maker = _maker(cache)
    is_new = False  # whether this rank has encoded the rows itself

    def make() -> Path:
        nonlocal is_new
        target = cache / _key_of(source, tokenizer, wanted, on_error)[:40]
        if is_sound(target):
            return target
        with FileLock(target.with_name(f".claim-{target.name}")):
            if not is_sound(target):  # another job may have made it meanwhile
                sweep(target)
                _make(source, work, target, num_proc, max_refused)
                is_new = True
        return target

    made = while_others_wait(maker == this_rank(), make, "encoding the data set")
    target = all_gather_objects(made)[maker]
    with agreed("opening the encoded data set"):
        encoded = EncodedDataset(target)
        counts = encoded.counts
        number = sum(count for reason, count in counts.items() if reason not in NOTES)
        if num_refused(counts) > max_refused * number:
            raise refusal(
                counts,
                f"{num_refused(counts)} of {number} rows were refused, more than max_refused={max_refused:g} "
                f"allows; what was encoded is kept in {target}",
            )
    warn_of_notes(counts, (*WARNED_OF_ROWS, *(() if is_new else WARNED_OF_TEMPLATES)))
    return encoded


def _make(source: Any, work: Work, target: Path, num_proc: int | None, max_refused: float) -> None:
    """Encode all rows into a temporary folder, and give it its name when it is complete."""
    tqdm = import_module("tqdm").tqdm  # comes with transformers
    look_first(source, work, _LOOKED_AT_FIRST, max_refused)
    made, scratch = temporary_beside(target), temporary_beside(target)
    is_quiet = None if this_rank() == 0 else True  # None lets tqdm draw if it writes to a terminal
    with tqdm(total=len(source), unit="row", unit_scale=True, desc="encoding", disable=is_quiet) as bar:
        build(source, work, made, scratch, num_proc, bar.update)
    publish(made, target, aside=unsound_beside(target))


def _maker(cache: Path) -> int:
    """The rank that encodes for this one: rank 0 if its folder is visible here, else the first on this host.

    Collective: all ranks.
    """
    probe = cache / f".probe-{share(uuid.uuid4().hex)}"
    with agreed(f"writing to {cache}"):
        if this_rank() == 0:
            probe.touch()
    host = None if _is_seen(probe) else socket.gethostname()
    hosts = all_gather_objects(host)
    if this_rank() == 0:
        probe.unlink(missing_ok=True)
    return 0 if host is None else hosts.index(host)


def _is_seen(probe: Path) -> bool:
    """Whether the file that rank 0 has made appears on this host within a few seconds."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while probe.name not in os.listdir(probe.parent):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _cache_folder(given: str | os.PathLike[str] | None) -> Path:
    """Absolute path of the given or the default folder."""
    if given is not None:
        return full_path(given)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "fsdp-sft" / "encoded"


def _key_of(source: Any, tokenizer: PreTrainedTokenizerBase, options: EncodeOptions, on_error: str) -> str:
    """A digest of everything that the encoded rows depend on."""
    # The rules for labels change with the library's version.
    from fsdp_sft import __version__

    backend = getattr(tokenizer, "backend_tokenizer", None)
    about = {
        "format": _FORMAT_VERSION,
        "versions": [__version__, *tokenizers.versions_of_tokenizers()],
        "data": _data_digest(source),
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


def _data_digest(source: Any) -> str:
    """A digest of all rows."""
    if isinstance(source, JsonLines):
        return "-".join(map(_file_digest, source.paths))
    fingerprint = data.dataset_fingerprint(source)
    if fingerprint is not None:
        return f"fingerprint {fingerprint}"
    digest = hashlib.sha256()
    for row in source:
        content = row_bytes(row)
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    """A digest of a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

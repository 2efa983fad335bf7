"""`encode_dataset`: when two encodings are the same, which rank encodes, and which ranks wait."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock
from typing_extensions import Unpack

from fsdp_sft._compat.data import versions_of_tokenizers
from fsdp_sft._model.view import tokenizer_of
from fsdp_sft._ranks.agree import agree_on, agreed, all_gather_objects, this_rank, while_others_wait
from fsdp_sft._tensors.disk import full_path
from fsdp_sft.collate.encoded.build import Job, Work, build, look_first, num_refused, refusal
from fsdp_sft.collate.encoded.source import digest_of, rows_to_read
from fsdp_sft.collate.encoded.store import EncodedDataset, is_sound, shard_paths
from fsdp_sft.collate.filtering import warn_of_notes
from fsdp_sft.collate.notes import WARNED_OF_ROWS, WARNED_OF_TEMPLATES
from fsdp_sft.collate.options import EncodeKeywords, EncodeOptions, check_count, options_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT_VERSION = 3
_SHARD_ROWS = 2048
_MAX_SHARDS = 512  # of larger data sets the shards are larger


def encode_dataset(
    rows: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    num_proc: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    on_dropped: Literal["error", "count", "ignore"] = "count",
    max_refused: float = 0.01,
    **options: Unpack[EncodeKeywords],
) -> EncodedDataset:
    """Tokenise rows once, into files that every rank memory-maps.

    Rows without a target are left out and counted, as in `filter_rows`, and rows that `encode_chat` would
    refuse are counted too. Of the same data, template, tokenizer, options and versions, what has been encoded
    is opened at once, and the warnings about its rows are repeated. Rows are encoded in shards of 2,048, or
    of a 512th of the data if that is more: a job that was killed loses those at which it worked, and the next
    one encodes the rest.

    Ranks of one host that see the same ``cache_dir`` share one encoding, which the first of them and its
    processes make while the others wait. Hosts that see the same ``cache_dir`` share it too.

    Args:
        rows: A sequence of rows as `encode_chat` takes them, a ``datasets.Dataset``, or the path of a
            ``.jsonl`` file or a list of such paths, which are read row by row. The same on all ranks.
        tokenizer: A fast tokenizer.
        max_length: Most tokens of a row.
        num_proc: Number of processes that encode; None takes one for each core, but no more than there is
            work for.
        cache_dir: Folder that holds encoded data; None is ``fsdp-sft/encoded`` in ``$XDG_CACHE_HOME`` or
            ``~/.cache``.
        on_dropped: What to do with a row if the template leaves out a text of an answer, as in `filter_rows`.
        max_refused: Largest share of refused rows that does not raise. What is encoded is kept, so that a
            second call with a larger share opens it.
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
    Memory: In each process the rows of one shard, before and after; pages of the files belong to the system.
    Disk: 8 bytes a token and 8 a row.

    Example:
        >>> encoded = fs.encode_dataset(rows, tokenizer, max_length=64, cache_dir="encoded")
        >>> len(encoded), dict(encoded.counts)
        (8, {'kept': 8})
    """
    tokenizer = tokenizer_of(tokenizer)
    wanted = options_of("encode_dataset", options, max_length=max_length, on_dropped=on_dropped)
    check_count("max_length", max_length)
    if num_proc is not None:
        check_count("num_proc", num_proc)
    if not 0 <= max_refused <= 1:
        raise ValueError(f"max_refused must be a share of 0 to 1, got {max_refused!r}")
    cache = _cache_folder(cache_dir)
    with agreed("looking at the rows to encode"):
        source = rows_to_read(rows)
        cache.mkdir(parents=True, exist_ok=True)
    agree_on("encoding", **{"number of rows": len(source)})

    def make() -> Path:
        target = cache / _key_of(source, tokenizer, wanted)[:40]
        jobs = _shards(target, len(source))
        if _missing(jobs):
            with FileLock(target.with_name(f".claim-{target.name}")):
                _make(source, Work(tokenizer, wanted), jobs, num_proc, max_refused)
        return target

    maker = _maker(cache)
    made = while_others_wait(maker == this_rank(), make, "encoding the data set")
    target = all_gather_objects(made)[maker]
    with agreed("opening the encoded data set"):
        encoded = EncodedDataset(target)
        counts = encoded.counts
        refused = num_refused(counts)
        if refused > max_refused * len(source):
            raise refusal(
                counts,
                f"{refused} of {len(source)} rows were refused, more than max_refused={max_refused:g} "
                f"allows; what was encoded is kept in {target}",
            )
        if not len(encoded):
            raise ValueError(f"no row has a target, counted {dict(counts)}{counts.first_examples()}")
    warn_of_notes(counts, (*WARNED_OF_ROWS, *WARNED_OF_TEMPLATES))
    return encoded


def _shards(folder: Path, number: int) -> list[Job]:
    """The shards of so many rows."""
    size = max(_SHARD_ROWS, -(-number // _MAX_SHARDS))
    paths = shard_paths(folder, -(-number // size))
    return [(path, i * size, min((i + 1) * size, number)) for i, path in enumerate(paths)]


def _missing(jobs: Sequence[Job]) -> list[Job]:
    """The shards of which there is no sound file."""
    return [job for job in jobs if not is_sound(job[0])]


def _make(source: Any, work: Work, jobs: Sequence[Job], num_proc: int | None, max_refused: float) -> None:
    """Encode the shards that are missing."""
    missing = _missing(jobs)  # again: another job may have made them meanwhile
    folder = jobs[0][0].parent
    folder.mkdir(exist_ok=True)
    for stale in folder.glob(".*"):  # of jobs that were killed
        stale.unlink()
    if len(missing) == len(jobs):
        look_first(source, work, max_refused)
    tqdm = import_module("tqdm").tqdm  # comes with transformers
    is_quiet = None if this_rank() == 0 else True  # None lets tqdm draw if it writes to a terminal
    with tqdm(total=len(source), unit="row", unit_scale=True, desc="encoding", disable=is_quiet) as bar:
        bar.update(len(source) - sum(stop - first for _, first, stop in missing))
        if missing:
            build(source, work, missing, num_proc, bar.update)


def _maker(cache: Path) -> int:
    """The rank that encodes for this one: the first that sees the same folder on the same host.

    Collective: all ranks.
    """
    place = os.stat(cache)
    seen = (socket.gethostname(), place.st_dev, place.st_ino)
    return all_gather_objects(seen).index(seen)


def _cache_folder(given: str | os.PathLike[str] | None) -> Path:
    """Absolute path of the given or the default folder."""
    if given is not None:
        return full_path(given)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "fsdp-sft" / "encoded"


def _key_of(source: Any, tokenizer: PreTrainedTokenizerBase, options: EncodeOptions) -> str:
    """A digest of everything that the encoded rows depend on."""
    # The rules for labels change with the library's version.
    from fsdp_sft import __version__

    backend = getattr(tokenizer, "backend_tokenizer", None)
    about = {
        "format": _FORMAT_VERSION,
        "versions": [__version__, *versions_of_tokenizers()],
        "data": digest_of(source),
        "tokenizer": hashlib.sha256(backend.to_str().encode()).hexdigest()
        if backend is not None
        else repr(tokenizer),
        "special": sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items()),
        "splits special tokens": getattr(tokenizer, "split_special_tokens", None),
        "templates": tokenizer.chat_template,
        **{
            key: sorted(value) if isinstance(value, frozenset) else value
            for key, value in asdict(options).items()
        },
    }
    return hashlib.sha256(json.dumps(about, default=repr).encode()).hexdigest()

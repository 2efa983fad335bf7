"""A data set, tokenised once into files that every rank memory-maps.

Each file, such as ``00003-of-00012.safetensors``, is a shard: a section of the rows that were given. It holds
int32 tensors: ``ids`` and ``labels`` of its rows, one row after the other, and ``lengths`` and ``targets``,
numbers of tokens and of targets of each row. Its metadata are the counts of the section. A file gets its name
when it is complete, so ranks need not tell each other what they have done: each encodes what is missing in
the folder that it sees, its own part first.
"""

from __future__ import annotations

import errno
import hashlib
import json
import marshal
import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import accumulate, chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from typing_extensions import Unpack

from fsdp_sft._compat.data import dataset_fingerprint, is_hub_dataset
from fsdp_sft._model.view import tokenizer_of
from fsdp_sft._ranks.agree import agree_on, agreed, this_rank, while_others_wait, world_size
from fsdp_sft._tensors.disk import full_path, sync_folder, temporary_beside, write_bytes
from fsdp_sft.collate.collator import REFUSALS, FilterCounts, kept_rows
from fsdp_sft.collate.encode import EncodedChat
from fsdp_sft.collate.notes import warn_of_notes
from fsdp_sft.collate.options import EncodeKeywords, EncodeOptions, options_of
from fsdp_sft.errors import ChatTemplateError, CheckpointCorruptError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT_VERSION = 5
_SHARD_ROWS = 2048
_MAX_SHARDS = 512  # of larger data sets the shards are larger
_COLUMNS = ("ids", "labels", "lengths", "targets")
# Reasons why a row cannot be encoded, and their errors; a row without a target can, but is not kept.
_REFUSED = {
    "malformed": RowError,
    "too_long": RowError,
    "refused_by_template": ChatTemplateError,
    "dropped_text": ChatTemplateError,
    "media": RowError,
}


def encode_dataset(
    rows: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    cache_dir: str | os.PathLike[str] | None = None,
    on_dropped: Literal["error", "count"] = "count",
    max_refused: float = 0.01,
    **options: Unpack[EncodeKeywords],
) -> EncodedDataset:
    """Tokenise rows once, into files that every rank memory-maps.

    Rows without a target are left out and counted, as in `filter_rows`, and rows that `encode_chat` would
    refuse are counted too. Of the same data, template, tokenizer, options and versions, what has been encoded
    is opened at once, and the warnings about its rows are repeated. Rows are encoded in shards of 2,048, or
    of a 512th of the data if that is more: a job that was killed loses those at which it worked, and the next
    one encodes the rest.

    All ranks encode. Those that see the same ``cache_dir`` share one encoding: each has a part of the shards,
    and then takes what others have left. A job of one GPU encodes on one core, but for the tokenizer's own
    threads; ``torchrun --nproc-per-node 16`` of a program that only encodes takes 16.

    Args:
        rows: A sequence of rows as `encode_chat` takes them, or a ``datasets.Dataset``. The same on all
            ranks.
        tokenizer: A fast tokenizer.
        max_length: Most tokens of a row.
        cache_dir: Folder that holds encoded data; None is ``fsdp-sft/encoded`` in ``$XDG_CACHE_HOME`` or
            ``~/.cache``.
        on_dropped: What to do with a row if the template leaves out a text of an answer, as in `filter_rows`.
        max_refused: Largest share of refused rows that does not raise. What is encoded is kept, so that a
            second call with a larger share goes on with it.
        **options: Further options of `encode_chat`.

    Returns:
        A sequence of `EncodedChat`, with ``counts``, ``lengths`` and ``num_targets``.

    Raises:
        ValueError: If more rows are refused than ``max_refused`` allows, as soon as a rank has refused so
            many, with the counts and an example of each reason. According to the most frequent reason it is a
            `ChatTemplateError` or another `RowError`.
            Also for no rows, and for ranks with different rows, tokenizers or options.
        ChatTemplateError: If there is no chat template, or it does not parse.
        OSError: If writing fails.

    Collective: all ranks; those that are done wait for the others, and need no longer time-out for it.
    Memory: In each process one shard; pages of the files belong to the system.
    Disk: 8 bytes a token and 8 a row.

    Example:
        >>> encoded = fs.encode_dataset(rows, tokenizer, max_length=64, cache_dir="encoded")
        >>> len(encoded), dict(encoded.counts)
        (8, {'kept': 8})
    """
    tokenizer = tokenizer_of(tokenizer)
    wanted = options_of("encode_dataset", options, max_length=max_length, on_dropped=on_dropped)
    if not 0 <= max_refused <= 1:
        raise ValueError(f"max_refused must be a share of 0 to 1, got {max_refused!r}")
    with agreed("looking at the rows to encode"):
        if not len(rows):
            raise ValueError("there are no rows to encode")
        # Slices of a Hugging Face data set of other formats are tables or arrays. A transform stays.
        is_plain = not is_hub_dataset(rows) or rows.format["type"] in (None, "custom")
        source = rows if is_plain else rows.with_format(None, columns=rows.format["columns"])
    digest = while_others_wait(True, partial(_digest_of, source, tokenizer, wanted), "naming the encoding")
    agree_on(
        "encoding",
        **{"number of rows": len(source), "the rows, the tokenizer or the options (a digest)": digest},
    )
    with agreed("naming the encoding", itemgetter(0)) as name:
        # Rank 0's: a data set with functions that cannot be hashed has another fingerprint in each process.
        name.told = f"{digest} {dataset_fingerprint(source)}"
    root = cache_dir or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fsdp-sft", "encoded"
    )
    folder = full_path(root) / hashlib.sha256(name.result.encode()).hexdigest()[:40]
    while_others_wait(
        True,
        partial(_encode_missing, source, folder, tokenizer, wanted, max_refused),
        "encoding the data set",
    )
    with agreed("opening the encoded data set"):
        encoded = EncodedDataset(folder)
        if not len(encoded):
            raise ValueError(f"no row has a target, counted {encoded.counts}")
    warn_of_notes(encoded.counts, {"answer_cut_off"})
    return encoded


def _digest_of(source: Any, tokenizer: PreTrainedTokenizerBase, options: EncodeOptions) -> str:
    """Digest of what the encoded rows depend on; of a ``datasets.Dataset`` with 64 of its rows.

    Its fingerprint stands for all rows.
    """
    # The rules for labels change with the library's version.
    from fsdp_sft import __version__

    backend = getattr(tokenizer, "backend_tokenizer", None)
    about = {
        "format": _FORMAT_VERSION,
        "versions": [__version__, *map(version, ("transformers", "tokenizers"))],
        # Its padding and truncation are those of the last call, whoever made it.
        "tokenizer": {**json.loads(backend.to_str()), "padding": None, "truncation": None}
        if backend is not None
        else repr(tokenizer),
        "special": tokenizer.special_tokens_map,
        "splits special tokens": getattr(tokenizer, "split_special_tokens", None),
        "templates": tokenizer.chat_template,
        "options": asdict(options),
    }
    some = 1 if dataset_fingerprint(source) is None else max(1, len(source) // 64)
    digest = hashlib.sha256()
    for row in chain([about], (source[index] for index in range(0, len(source), some))):
        row = vars(row) if isinstance(row, EncodedChat) else row
        # Keys are not sorted: templates print objects in the order of their keys, so the order matters.
        try:
            content = marshal.dumps(row, 0)  # a quarter of JSON's time; 0 writes the same whatever is shared
        except ValueError:  # not plain data
            content = json.dumps(
                row, default=lambda one: one.tolist() if hasattr(one, "tolist") else repr(one), skipkeys=True
            ).encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _encode_missing(
    source: Any,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
    max_refused: float,
) -> None:
    """Encode the shards that are not there: first this rank's part of them, then what others have left.

    Others work on theirs from the beginning, so theirs are taken from the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = max(_SHARD_ROWS, -(-len(source) // _MAX_SHARDS))
    starts = range(0, len(source), size)
    jobs = list(zip(_shard_paths(folder, len(starts)), starts, strict=True))
    first, end = ((this_rank() + n) * len(jobs) // world_size() for n in (0, 1))
    encoded = FilterCounts()
    tqdm = import_module("tqdm").tqdm  # comes with transformers
    with tqdm(
        total=len(source),
        unit="row",
        unit_scale=True,
        desc="encoding",
        disable=None if this_rank() == 0 else True,  # None lets tqdm draw if it writes to a terminal
    ) as bar:
        for path, start in (*jobs[first:end], *reversed(jobs[end:] + jobs[:first])):
            section = range(start, min(start + size, len(source)))
            if not path.exists():
                # Of a Hugging Face data set a section at once is far faster than its rows one by one.
                rows = (
                    source.__getitems__(section) if is_hub_dataset(source) else [source[i] for i in section]
                )
                _encode_shard(path, start, rows, tokenizer, options)
            _read_shard(path, encoded)
            _refuse_many(encoded, max_refused, len(source))
            bar.update(len(section))


def _encode_shard(
    path: Path, first: int, rows: list[Any], tokenizer: PreTrainedTokenizerBase, options: EncodeOptions
) -> None:
    """Encode rows, the first of which has the index `first`, into a file."""
    columns = {name: array("i") for name in _COLUMNS}
    counts = FilterCounts()
    for _, chat in kept_rows(rows, tokenizer, options, counts, first=first):
        number = len(chat.input_ids)
        # Half the time of array.fromlist.
        columns["ids"].frombytes(struct.pack(f"{number}i", *chat.input_ids))
        columns["labels"].frombytes(struct.pack(f"{number}i", *chat.labels))
        columns["lengths"].append(number)
        columns["targets"].append(chat.num_targets)
    tensors = {
        name: torch.frombuffer(values, dtype=torch.int32) if values else torch.empty(0, dtype=torch.int32)
        for name, values in columns.items()
    }
    temporary = temporary_beside(path)
    try:
        write_bytes(
            temporary,
            save(
                tensors,
                {"counts": json.dumps([counts["kept"], counts.indices, counts.examples], default=list)},
            ),
        )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _refuse_many(counts: FilterCounts, max_refused: float, number: int) -> None:
    """Raise the error of the most frequent reason if more of so many rows are refused than allowed."""
    refused = sum(counts.get(reason, 0) for reason in _REFUSED)
    if refused > max_refused * number:
        reason = max(_REFUSED, key=lambda reason: counts.get(reason, 0))
        raise _REFUSED[reason](
            f"{refused} of {sum(counts.get(reason, 0) for reason in ('kept', *REFUSALS))} rows were refused, "
            f"more than max_refused={max_refused:g} of all {number} allows; counted {counts}\n"
            "Leave such rows out, change the options, or allow more of them (max_refused=); what was encoded "
            "is kept",
            reason=reason,
        )


def _shard_paths(folder: Path, number: int) -> list[Path]:
    """Paths of the files of a folder that has so many."""
    return [folder / f"{i:05d}-of-{number:05d}.safetensors" for i in range(number)]


def _read_shard(path: Path, counts: FilterCounts) -> dict[str, torch.Tensor]:
    """The memory-mapped tensors of a file, int32 (N,); its counts are added to `counts`.

    Raises:
        CheckpointCorruptError: If it is damaged.
        OSError: If it cannot be read.
    """
    try:
        with safe_open(path, "pt") as file:
            columns = {name: file.get_tensor(name) for name in _COLUMNS}
            kept, indices, examples = json.loads(file.metadata()["counts"])
        ids, labels, lengths, targets = columns.values()
        total = int(lengths.sum(dtype=torch.int64))
        if (len(ids), len(labels), len(targets)) != (total, total, len(lengths)) or (lengths < 1).any():
            raise ValueError("its tensors do not belong together")
        counts["kept"] += kept
        for reason, rows in indices.items():
            counts.add(reason, rows, examples[reason])
    except (SafetensorError, RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointCorruptError(
            f"{path} is damaged: {error}; delete it, and encode the rows anew"
        ) from None
    return columns


class EncodedDataset(Sequence[EncodedChat]):
    """Encoded rows in memory-mapped files, as `encode_dataset` returns them.

    A row is an `EncodedChat`, made when it is indexed. Workers of a DataLoader and ranks of one machine share
    the memory of the files. Pickling stores only the path of the folder.

    Args:
        path: Folder of an encoded data set.

    Attributes:
        path: Folder of the encoded data set.
        counts: Numbers of rows that were kept and left out, with indices and examples by reason; see
            `FilterCounts`.
        lengths: Tokens of each row, int32 (N,).
        num_targets: Targets of each row after the shift, int32 (N,).

    Raises:
        FileNotFoundError: If there is no such folder.
        CheckpointCorruptError: If a file is missing or damaged.

    Memory: The rows in use, 16 bytes a row, and ``counts``; the files' pages belong to the system, which may
    drop them.

    Example:
        >>> encoded = fs.encode_dataset(rows, tokenizer, max_length=64, cache_dir="encoded")
        >>> type(encoded[0]).__name__, encoded.lengths.shape
        ('EncodedChat', torch.Size([8]))
        >>> sampler = fs.PackedSampler(
        ...     encoded.lengths, num_targets=encoded.num_targets, max_length=128
        ... )
        >>> first = [encoded[row] for row in next(iter(sampler))]
        >>> pack = fs.PackedCollator(max_length=128)(first)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(errno.ENOENT, "no folder of encoded rows", str(path))
        if files != _shard_paths(self.path, len(files)):
            raise CheckpointCorruptError(f"a file of {path} is missing; encode the rows again, which adds it")
        self.counts = FilterCounts()
        self._shards = [_read_shard(file, self.counts) for file in files]
        self.lengths, self.num_targets = (
            torch.cat([columns[name] for columns in self._shards]) for name in ("lengths", "targets")
        )
        self._begins = torch.cat([one["lengths"].cumsum(0) - one["lengths"] for one in self._shards])
        self._first_rows = [0, *accumulate(len(one["lengths"]) for one in self._shards)]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> EncodedChat: ...

    @overload
    def __getitem__(self, index: slice) -> list[EncodedChat]: ...

    def __getitem__(self, index: int | slice) -> EncodedChat | list[EncodedChat]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        columns = self._shards[bisect_right(self._first_rows, index) - 1]
        begin = int(self._begins[index])
        kept = slice(begin, begin + int(self.lengths[index]))
        return EncodedChat(columns["ids"][kept].tolist(), columns["labels"][kept].tolist())

    def __reduce__(self) -> tuple[type[EncodedDataset], tuple[Path]]:
        return EncodedDataset, (self.path,)

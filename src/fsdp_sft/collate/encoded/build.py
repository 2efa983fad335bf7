"""Encode rows into the files of a folder, with any number of processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

from fsdp_sft.collate.encode import EncodedChat, encode_rows
from fsdp_sft.collate.encoded.source import portable, rows_of
from fsdp_sft.collate.encoded.store import Shard
from fsdp_sft.collate.filtering import FilterCounts, judge_row
from fsdp_sft.collate.options import EncodeOptions
from fsdp_sft.errors import RowError, row_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Reasons why a row cannot be encoded; a row without a target can, but is not kept.
_REFUSED = ("malformed", "too_long", "refused_by_template", "dropped_text", "no_reasoning", "media")

_FEWEST = 4000  # rows that take less time to encode than a process takes to start
_BLOCK_ROWS = 256
_LOOKED_AT_FIRST = 500

Job = tuple[Path, int, int]  # file of a shard, and the first and the end of its rows


@dataclass(frozen=True)
class Work:
    """How rows are to be encoded.

    Attributes:
        tokenizer: The tokenizer.
        options: Options of `encode_chat`.
    """

    tokenizer: PreTrainedTokenizerBase
    options: EncodeOptions


def look_first(source: Any, work: Work, max_refused: float) -> None:
    """Encode a sample of the rows, and raise if far more of them are refused than allowed.

    Raises:
        ChatTemplateError: If there is no chat template for rows that need one, or it does not parse.
        ValueError: Or a subclass, if more rows of the sample are refused than chance would explain.
    """
    counts = FilterCounts()
    indices = sorted({len(source) * i // _LOOKED_AT_FIRST for i in range(_LOOKED_AT_FIRST)})
    for index in indices:
        (row,) = rows_of(source, index, index + 1)
        judge_row(row, index, work.tokenizer, work.options, counts, "count")
    # Allow four standard deviations; the variance of a binomial with a small share is about its mean.
    expected = max_refused * len(indices)
    if num_refused(counts) > expected + 4 * expected**0.5:
        said = f"of {len(indices)} rows looked at first, {num_refused(counts)} were refused"
        raise refusal(counts, f"{said}; nothing was encoded")


def build(
    source: Any, work: Work, jobs: Sequence[Job], num_proc: int | None, tick: Callable[[int], object]
) -> None:
    """Encode shards into their files.

    Args:
        source: All rows.
        work: How to encode them.
        jobs: The shards.
        num_proc: Number of processes; None takes one for each core that this process may use, but no more
            than there is work for.
        tick: Called with the number of rows of each shard that is done.
    """
    total = sum(stop - first for _, first, stop in jobs)
    number = min(num_proc or max(1, min(len(os.sched_getaffinity(0)), total // _FEWEST)), len(jobs))
    if number == 1:
        for path, first, stop in jobs:
            encode_shard(work, path, first, rows_of(source, first, stop))
            tick(stop - first)
        return
    edges = [len(jobs) * i // number for i in range(number + 1)]
    with ThreadPoolExecutor(number) as pool:
        running = [
            pool.submit(_in_a_process, source, work, jobs[start:end], tick) for start, end in pairwise(edges)
        ]
    for one in running:
        one.result()


def encode_shard(work: Work, path: Path, first: int, rows: Sequence[Any]) -> None:
    """Encode the rows of a shard into its file; ``first`` is the index of the first."""
    shard = Shard()
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        for index, (row, chat) in enumerate(zip(block, _encoded(block, work), strict=True), first + start):
            reason, kept = judge_row(row, index, work.tokenizer, work.options, shard.counts, "count", chat)
            if reason == "kept" and kept is not None:
                shard.add(kept)
    shard.write(path)


def _encoded(rows: Sequence[Any], work: Work) -> list[EncodedChat | None]:
    """Rows encoded in one call; None for those that are encoded already, and for all if one fails."""
    chats = {i: row for i, row in enumerate(rows) if not isinstance(row, EncodedChat)}
    try:
        made = dict(zip(chats, encode_rows(list(chats.values()), work.tokenizer, work.options), strict=True))
    except Exception:  # the caller then encodes the rows one by one, and so finds those that fail
        made = {}
    return [made.get(i) for i in range(len(rows))]


def num_refused(counts: FilterCounts) -> int:
    """Number of rows that could not be encoded."""
    return sum(counts.get(reason, 0) for reason in _REFUSED)


def refusal(counts: FilterCounts, says: str) -> RowError:
    """The error for refused rows, for the most frequent reason."""
    return row_error(
        f"{says}; counted {dict(counts)}{counts.first_examples()}\n"
        "Leave such rows out, change the options, or allow more of them (max_refused=)",
        max(_REFUSED, key=lambda reason: counts.get(reason, 0)),
    )


def _in_a_process(source: Any, work: Work, jobs: Sequence[Job], tick: Callable[[int], object]) -> None:
    """Encode shards in a process of its own, to which this thread listens.

    The process is started anew: a fork could inherit a lock that a thread holds, and multiprocessing's
    "spawn" would import the caller's script again. The job goes through a pipe, since others may write into
    the folder, and a pickle from there would run their code.
    """
    start = [sys.executable, "-P", "-c", f"from {__name__} import _serve; _serve()"]  # -P: see `_serve`
    quiet = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **quiet}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(start, env=env, stdin=PIPE, stdout=PIPE, stderr=log) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError), process.stdin:  # it has ended, and its exit code says so
            pickle.dump((work, jobs, *portable(source, jobs[0][1], jobs[-1][2])), process.stdin)
        for line in process.stdout:
            tick(int(line))
        if process.wait():
            log.seek(0)
            hint = "; -9 often means that memory ran out: lower num_proc" if process.returncode == -9 else ""
            raise RuntimeError(
                f"a process that encoded rows ended with exit code {process.returncode}{hint}:\n"
                + log.read()[-2000:].decode(errors="replace")
            )


def _serve() -> None:
    """Encode the shards of a job that comes through standard input, and say the rows of each that is done.

    Python is started with ``-P``: otherwise the current folder, which may be a stranger's, would come first
    on its path.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0) as done:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print
        work, jobs, source, offset = pickle.load(sys.stdin.buffer)  # from the process that started this one
        for path, first, stop in jobs:
            encode_shard(work, path, first, rows_of(source, first - offset, stop - offset))
            done.write(b"%d\n" % (stop - first))

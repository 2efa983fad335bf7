"""Encode rows into a folder, with any number of processes."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_sft.collate.encode import EncodedChat, encode_rows
from fsdp_sft.collate.encoded.source import Unreadable, portable, rows_of
from fsdp_sft.collate.encoded.store import RowWriter, joined
from fsdp_sft.collate.filtering import FilterCounts, check_template_for, judge_row
from fsdp_sft.collate.options import EncodeOptions
from fsdp_sft.errors import RowError, row_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Reasons why a row cannot be encoded; a row without a target can, but is not kept.
_REFUSED = ("malformed", "too_long", "refused_by_template", "dropped_text", "no_reasoning", "media")

_FEWEST = 4000  # rows that take less time to encode than a process takes to start
_BLOCK_ROWS = 256


Share = tuple[Any, int, int]  # rows, and the first and the end of those that one process encodes


@dataclass(frozen=True)
class Work:
    """How rows are to be encoded.

    Attributes:
        tokenizer: The tokenizer.
        options: Options of `encode_chat`.
        stops_at_refusal: Whether encoding ends at the first row that is refused.
    """

    tokenizer: PreTrainedTokenizerBase
    options: EncodeOptions
    stops_at_refusal: bool


def look_first(source: Any, work: Work, number: int, max_refused: float) -> None:
    """Encode a sample of the rows, and raise if far more of them are refused than allowed.

    Args:
        source: All rows.
        work: How to encode them.
        number: Rows in the sample, which is spread over all rows.
        max_refused: Share of all rows that may be refused.

    Raises:
        ChatTemplateError: If there is no chat template for rows that need one, or it does not parse.
        ValueError: Or a subclass, if more rows of the sample are refused than chance would explain.
    """
    counts = FilterCounts()
    indices = sorted({len(source) * i // number for i in range(number)})
    rows = [(index, rows_of(source, index, index + 1)[0]) for index in indices]
    any(check_template_for(row, work.tokenizer, work.options) for _, row in rows)
    for index, row in rows:
        _judge(row, index, work, counts, None)
    share = 0.0 if work.stops_at_refusal else max_refused
    expected = share * len(rows)
    # Allow four standard deviations; the variance of a binomial with a small share is about its mean.
    if num_refused(counts) > expected + 4 * expected**0.5:
        raise refusal(
            counts,
            f"of {len(rows)} rows looked at first, {num_refused(counts)} were refused; nothing was encoded",
        )


def build(
    source: Any,
    work: Work,
    folder: Path,
    scratch: Path,
    num_proc: int | None,
    tick: Callable[[int], None],
) -> None:
    """Encode all rows into a new folder, and flush it to the disk.

    Args:
        source: The rows.
        work: How to encode them.
        folder: Folder to make; it must not exist.
        scratch: Folder for temporary files, made and deleted here; it must not exist.
        num_proc: Number of processes; None takes one for each core that this process may use, but no more
            than there is work for.
        tick: Function called with the number of rows of each block that is done.
    """
    number = num_proc or min(len(os.sched_getaffinity(0)), max(1, len(source) // _FEWEST))
    edges = [len(source) * i // number for i in range(number + 1)]
    shares = [(source, start, stop) for start, stop in pairwise(edges) if start < stop]
    scratch.mkdir(mode=0o700)
    try:
        parts = [scratch / str(i) for i in range(len(shares))]
        if len(shares) == 1:
            results = [encode_share(shares[0], work, parts[0], tick)]
        else:
            results = _in_processes(shares, work, parts, tick)
        counts, rows = FilterCounts(), 0
        for part_counts, part_rows in results:
            counts.join(part_counts, rows)
            rows += part_rows
            if work.stops_at_refusal and num_refused(counts):
                raise refusal(counts, "a row was refused")
        if not counts["kept"]:
            raise ValueError(f"no row has a target, counted {dict(counts)}{first_examples(counts)}")
        joined(parts, folder, counts)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def encode_share(
    share: Share, work: Work, folder: Path, tick: Callable[[int], None]
) -> tuple[FilterCounts, int]:
    """Encode some of the rows into a new folder.

    Returns:
        (counts, number of rows that were read).
    """
    counts, index = FilterCounts(), 0
    writer = RowWriter(folder)
    source, first, last = share
    for start in range(first, last, _BLOCK_ROWS):
        rows = rows_of(source, start, min(start + _BLOCK_ROWS, last))
        for row, encoded in zip(rows, _encoded(rows, work), strict=True):
            chat = _judge(row, index, work, counts, encoded)
            if chat is not None:
                _add(writer, chat, index, counts)
            index += 1
            if work.stops_at_refusal and num_refused(counts):
                return counts, index
        tick(len(rows))
    writer.flush()
    return counts, index


def num_refused(counts: FilterCounts) -> int:
    """Number of rows that could not be encoded."""
    return sum(counts.get(reason, 0) for reason in _REFUSED)


def refusal(counts: FilterCounts, says: str) -> RowError:
    """The error for refused rows, for the most frequent reason."""
    return row_error(
        f"{says}; counted {dict(counts)}{first_examples(counts)}\n"
        "Leave such rows out, change the options, or count them (on_error='count', max_refused=)",
        max(_REFUSED, key=lambda reason: counts.get(reason, 0)),
    )


def first_examples(counts: FilterCounts) -> str:
    """The first example of each reason, a line each."""
    return "".join(f"\n  {texts[0]}" for texts in counts.examples.values())


def _judge(
    row: Any, index: int, work: Work, counts: FilterCounts, encoded: EncodedChat | None
) -> EncodedChat | None:
    """The encoded row if it is kept, else None; either way the row is counted."""
    if isinstance(row, Unreadable):
        counts.add("malformed", index, row.error)
        return None
    reason, chat = judge_row(row, index, work.tokenizer, work.options, counts, "count", encoded)
    return chat if reason == "kept" else None


def _add(writer: RowWriter, chat: EncodedChat, index: int, counts: FilterCounts) -> None:
    """Write a row, or count it as malformed if the files cannot hold it."""
    try:
        writer.add(chat)
    except (ValueError, OverflowError) as error:  # only a tokenised row can have such ids or labels
        counts["kept"] -= 1
        counts.add("malformed", index, str(error))


def _encoded(rows: Sequence[Any], work: Work) -> list[EncodedChat | None]:
    """Rows encoded in one call; None for unreadable and encoded ones, and for all if one fails."""
    chats = {i: row for i, row in enumerate(rows) if not isinstance(row, EncodedChat | Unreadable)}
    try:
        made = dict(zip(chats, encode_rows(list(chats.values()), work.tokenizer, work.options), strict=True))
    except Exception:  # the caller then encodes the rows one by one, and so finds those that fail
        made = {}
    return [made.get(i) for i in range(len(rows))]


def _in_processes(
    shares: Sequence[Share], work: Work, parts: Sequence[Path], tick: Callable[[int], None]
) -> list[tuple[FilterCounts, int]]:
    """Encode each share in a separate process; (counts, rows that were read) of each.

    The processes run `worker`: a fork could inherit a lock that a thread holds, and multiprocessing's
    "spawn" would import the caller's script again. Jobs and results go through pipes, since others may write
    into the folder, and a pickle from there would run their code.
    """
    running: list[_Worker] = []
    try:
        for share, part in zip(shares, parts, strict=True):
            job = (portable(*share), work, part)
            running.append(_Worker(job, part.with_suffix(".log"), tick))
        return [worker.result() for worker in running]
    finally:
        for worker in running:
            worker.end()


class _Worker:
    """A process that encodes rows, and a thread that talks with it."""

    def __init__(self, job: Any, log: Path, tick: Callable[[int], None]) -> None:
        with open(log, "xb") as errors:
            # -P: otherwise the current folder, which may be a stranger's, would come first on the path.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fsdp_sft.collate.encoded.worker"],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "TOKENIZERS_PARALLELISM": "false",
                    "OMP_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._job, self._log, self._tick = pickle.dumps(job), log, tick
        self._result: tuple[FilterCounts, int] | None = None
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def _talk(self) -> None:
        sent, received = self._process.stdin, self._process.stdout
        assert sent is not None
        assert received is not None
        with suppress(BrokenPipeError, EOFError):  # it has ended, and its exit code says so
            with sent:
                sent.write(self._job)
            for line in received:
                if line == b"\n":
                    self._result = pickle.load(received)
                    break
                self._tick(int(line))

    def result(self) -> tuple[FilterCounts, int]:
        """Wait for the process, and return what it has encoded."""
        code = self._process.wait()
        self._thread.join()
        if code or self._result is None:
            tail = self._log.read_text(errors="replace")[-2000:]
            hint = "; -9 often means that memory ran out: lower num_proc" if code == -9 else ""
            raise RuntimeError(f"a process that encoded rows ended with exit code {code}{hint}:\n{tail}")
        return self._result

    def end(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        self._process.wait()
        self._thread.join()

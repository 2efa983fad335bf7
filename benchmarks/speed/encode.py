"""A data set tokenised once: speed beside the tokenizer's own, bytes, memory, and the second start.

    FSDP_SFT_DATA=DATA TOKENIZERS_PARALLELISM=false python -m benchmarks.speed.encode --rows 1000000

Rows are made of the real ones (``FSDP_SFT_DATA``), each with a number in its first message, until there are
as many as asked for. The tokenizer is a byte-level BPE of 8,000 tokens trained on them, with ChatML. What is
compared runs in turns, each time in a new process, on ``--part`` of the rows; medians of ``--times``. All
rows are encoded once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fsdp_sft as fs
from benchmarks.checks.labels import data_files, trained_here
from benchmarks.tables import publish, table
from fsdp_sft.collate.rows import read_row

OPENED = """
import sys, time
import fsdp_sft as fs, fsdp_sft.collate.encoded, torch, transformers
def anonymous():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))
before = anonymous()
start = time.perf_counter()
encoded = fs.EncodedDataset(sys.argv[1])
sum(len(encoded[i].input_ids) for i in range(0, len(encoded), max(1, len(encoded) // 20000)))
print((anonymous() - before) / 1024, time.perf_counter() - start)
"""


def chats(number: int) -> Iterator[dict[str, Any]]:
    """``number`` rows, no two of them the same."""
    files = data_files()
    real = [
        {"messages": read_row(row).messages, **({"tools": tools} if (tools := read_row(row).tools) else {})}
        for rows in files.values()
        for row in rows
    ]
    for i in range(number):
        row = real[i % len(real)]
        first, *rest = row["messages"]
        yield {**row, "messages": [{**first, "content": f"{i} {first['content']}"}, *rest]}


def write_rows(path: Path, number: int) -> None:
    """``number`` rows as JSON lines."""
    with open(path, "w") as out:
        for row in chats(number):
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


def bare(rows: list[Any], tokenizer: Any, *, rendered: list[str] | None, batch_size: int = 256) -> int:
    """Tokens of the same texts, by the tokenizer alone; rendered first unless they are given."""
    total = 0
    for start in range(0, len(rows), batch_size):
        part = slice(start, start + batch_size)
        texts = rendered[part] if rendered else [_text(row, tokenizer) for row in rows[part]]
        total += sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    return total


def _text(row: Any, tokenizer: Any) -> str:
    return str(tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False))


def seconds(work: Callable[[], Any]) -> float:
    """It takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ways(rows: list[Any], tokenizer: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """What is compared, by name."""
    rendered = [_text(row, tokenizer) for row in rows]
    return {
        "bare tokenisation": lambda: bare(rows, tokenizer, rendered=rendered),
        "rendered and tokenised, a row at a time": lambda: [
            tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=True)
            for row in rows
        ],
        "rendered and tokenised, 256 rows at a time": lambda: bare(rows, tokenizer, rendered=None),
        "encode_dataset": lambda: encode(rows, tokenizer, folder),
    }


def compared(tokenizer: Any, path: Path, number: int, times: int) -> list[str]:
    """encode_dataset with one process beside the tokenizer alone, in turns.

    Each in a process of its own: of two ways in one process the second takes a tenth longer, whichever it
    is, for memory that the first has left in pieces.
    """
    rows = read(path)
    took: dict[str, list[float]] = {name: [] for name in ways([], tokenizer, path.parent)}
    for _ in range(times):
        for name, seen in took.items():
            command = [sys.executable, "-m", "benchmarks.speed.encode", "--way", name, "--file", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seen.append(float(done.stdout.split()[-1]))
    tokens = bare(rows, tokenizer, rendered=None)
    ours, found = statistics.median(took["encode_dataset"]), []
    for name, seen in took.items():
        median = statistics.median(seen)
        spread = f"{min(seen):.2f} to {max(seen):.2f}"
        found.append([name, f"{median:.2f}", spread, f"{tokens / median / 1e6:.2f}", f"{ours / median:.2f}"])
    head = [f"{number:,} rows, one core", "s", "of all", "M tokens/s", "encode_dataset over it"]
    return [*table(head, found), ""]


def read(path: Path) -> list[Any]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def encode(rows: Any, tokenizer: Any, folder: Path, cache_dir: str | None = None) -> Any:
    """The data set, encoded anew unless it is in the cache."""
    place = cache_dir or tempfile.mkdtemp(dir=folder)
    return fs.encode_dataset(rows, tokenizer, max_length=1 << 20, cache_dir=place, max_refused=1)


def whole(tokenizer: Any, folder: Path, number: int) -> list[str]:
    """All rows: by one process, again from the cache, and opened by a rank."""
    path = folder / "all.jsonl"
    write_rows(path, number)
    rows = read(path)
    place = str(folder / "whole")
    alone = seconds(lambda: encode(rows, tokenizer, folder, place))
    start = time.perf_counter()
    encoded = encode(rows, tokenizer, folder, place)
    again = time.perf_counter() - start
    total = int(encoded.lengths.sum(dtype=torch.int64))
    stored = sum(file.stat().st_size for file in encoded.path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", OPENED, str(encoded.path)], capture_output=True, text=True, check=True
    )
    megabytes, opening = map(float, done.stdout.split())
    return [
        f"- {number:,} rows, {path.stat().st_size / 1e9:.2f} GB of JSON lines, {total / 1e6:.0f} M tokens",
        f"- one process: {alone:.0f} s, {total / alone / 1e6:.2f} M tokens/s",
        f"- {stored / total:.2f} bytes a token on disk; second start {again:.2f} s",
        f"- a rank: {megabytes:.1f} MiB of anonymous memory after 20,000 rows, read in {opening:.2f} s",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--part", type=int, default=10_000, help="rows of the alternating comparison")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--way", help="for itself: what this process times, on the rows of --file")
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    if os.environ.get("TOKENIZERS_PARALLELISM") != "false":
        raise SystemExit("set TOKENIZERS_PARALLELISM=false: one core is compared with one core")
    tokenizer = trained_here(data_files())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.way:
            rows = read(options.file)
            ways(rows[:256], tokenizer, folder)[options.way]()  # what is imported and probed once
            print(seconds(ways(rows, tokenizer, folder)[options.way]))
            return
        write_rows(folder / "part.jsonl", options.part)
        lines = compared(tokenizer, folder / "part.jsonl", options.part, options.times)
        lines += whole(tokenizer, folder, options.rows)
    publish("A data set tokenised once", lines, options.output)


if __name__ == "__main__":
    main()

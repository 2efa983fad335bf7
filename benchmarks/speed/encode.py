"""A data set tokenised once: speed beside the tokenizer's own, bytes, memory, and the second start.

    FSDP_SFT_DATA=DATA TOKENIZERS_PARALLELISM=false python -m benchmarks.speed.encode --rows 1000000

Rows are made of the real ones (``FSDP_SFT_DATA``), each with a number in its first message, until there are
as many as asked for. The tokenizer is a byte-level BPE of 8,000 tokens trained on them, with ChatML. Ratios
are of one run, alternating, the median of ``--times``, on ``--part`` of the rows; the whole is encoded once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fsdp_sft as fs
from benchmarks.checks.labels import data_files, trained_here
from fsdp_sft.collate.rows import read_row

OPENED = """
import sys, time
import fsdp_sft as fs, fsdp_sft.encoded, torch, transformers
def anonymous():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))
before = anonymous()
start = time.perf_counter()
encoded = fs.EncodedDataset(sys.argv[1])
sum(len(encoded[i].input_ids) for i in range(0, len(encoded), max(1, len(encoded) // 20000)))
print((anonymous() - before) / 1024, time.perf_counter() - start)
"""


def write_rows(path: Path, number: int) -> None:
    """``number`` rows as JSON lines."""
    files = data_files()
    real = [
        {"messages": read_row(row).messages, **({"tools": tools} if (tools := read_row(row).tools) else {})}
        for rows in files.values()
        for row in rows
    ]
    with open(path, "w") as out:
        for i in range(number):
            row = real[i % len(real)]
            first, *rest = row["messages"]
            changed = {**row, "messages": [{**first, "content": f"{i} {first['content']}"}, *rest]}
            out.write(json.dumps(changed, ensure_ascii=False) + "\n")


def bare(rows: list[Any], tokenizer: Any, *, rendered: list[str] | None) -> int:
    """Tokens of the same texts, by the tokenizer alone; rendered first unless they are given."""
    total = 0
    for start in range(0, len(rows), 256):
        texts = (
            rendered[start : start + 256]
            if rendered
            else [_text(r, tokenizer) for r in rows[start : start + 256]]
        )
        total += sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    return total


def _text(row: Any, tokenizer: Any) -> str:
    return str(tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False))


def seconds(work: Callable[[], Any]) -> float:
    """It takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--part", type=int, default=10_000, help="rows of the alternating comparison")
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    if os.environ.get("TOKENIZERS_PARALLELISM") != "false":
        raise SystemExit("set TOKENIZERS_PARALLELISM=false: one core is compared with one core")
    tokenizer = trained_here(data_files())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "part.jsonl", options.part)
        rows = [json.loads(line) for line in (folder / "part.jsonl").read_text().split("\n") if line]
        rendered = [_text(row, tokenizer) for row in rows]

        def encode(path: str, num_proc: int) -> Any:
            place = tempfile.mkdtemp(dir=folder)
            return fs.encode_dataset(
                folder / path,
                tokenizer,
                max_length=1 << 20,
                num_proc=num_proc,
                cache_dir=place,
                max_refused=1,
            )

        took: dict[str, list[float]] = {}
        for _ in range(options.times):
            for what, work in (
                ("bare tokenisation", lambda: bare(rows, tokenizer, rendered=rendered)),
                ("rendered and tokenised", lambda: bare(rows, tokenizer, rendered=None)),
                ("encode_dataset", lambda: encode("part.jsonl", 1)),
            ):
                took.setdefault(what, []).append(seconds(work))
        tokens = bare(rows, tokenizer, rendered=rendered)
        median = {what: statistics.median(times) for what, times in took.items()}
        for what, value in median.items():
            ratios = [a / b for a, b in zip(took[what], took["encode_dataset"], strict=True)]
            speed, ratio = tokens / value / 1e6, statistics.median(ratios)
            print(f"{what}: {speed:.2f} M tokens/s; encode_dataset is {ratio:.2f} of it")
        write_rows(folder / "all.jsonl", options.rows)
        size = (folder / "all.jsonl").stat().st_size
        print(f"{options.rows} rows, {size / 1e9:.2f} GB of JSON lines", flush=True)
        alone = seconds(lambda: encode("all.jsonl", 1)) if options.rows <= 100_000 else None
        place = folder / "whole"
        wanted = {"max_length": 1 << 20, "num_proc": 2, "cache_dir": place, "max_refused": 1}
        start = time.perf_counter()
        encoded = fs.encode_dataset(folder / "all.jsonl", tokenizer, **wanted)
        both = time.perf_counter() - start
        total = int(encoded.lengths.sum(dtype=torch.int64))
        stored = sum(path.stat().st_size for path in encoded.path.iterdir())
        print(
            f"two processes: {total / 1e6:.0f} M tokens in {both:.0f} s, {total / both / 1e6:.2f} M tokens/s"
        )
        if alone is not None:
            print(f"two processes are {alone / both:.2f} times one")
        print(f"{stored / total:.2f} bytes a token on disk")
        again = seconds(lambda: fs.encode_dataset(folder / "all.jsonl", tokenizer, **wanted))
        print(f"second start: {again:.2f} s")
        done = subprocess.run(
            [sys.executable, "-c", OPENED, str(encoded.path)], capture_output=True, text=True, check=True
        )
        megabytes, opening = map(float, done.stdout.split())
        print(f"a rank: {megabytes:.1f} MiB of anonymous memory after 20,000 rows, read in {opening:.2f} s")


if __name__ == "__main__":
    main()

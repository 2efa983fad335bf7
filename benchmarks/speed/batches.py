"""Batches for the model, in tokens a second: from chats and from what is encoded already, padded and packed.

    FSDP_SFT_DATA=DATA TOKENIZERS_PARALLELISM=false python -m benchmarks.speed.batches

All ways give the same rows, in one run, in turns; each figure is a median. Padded batches have 16 rows, packs
at most 8,192 tokens; tokens are those of the rows, without padding. The tokenizer alone gets the rendered
texts, 16 at a time.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import fsdp_sft as fs
from benchmarks.checks.labels import data_files, trained_here
from benchmarks.speed.encode import bare, chats
from benchmarks.tables import publish, table

ROWS = 16
CAPACITY = 8192


def groups(number: int) -> list[list[int]]:
    """Rows of each padded batch."""
    return [list(range(start, min(start + ROWS, number))) for start in range(0, number, ROWS)]


def collated(collator: Callable[[list[Any]], Any], rows: Any, batches: Iterable[list[int]]) -> int:
    """Tokens in all batches."""
    return sum(int(collator([rows[i] for i in batch])["attention_mask"].ne(0).sum()) for batch in batches)


def packed(collator: fs.PackedCollator, rows: Any, packs: Iterable[list[int]]) -> int:
    """Tokens in all packs, which may have a fill."""
    total = 0
    for pack in packs:
        chosen = [rows[i] for i in pack]
        collator(chosen)
        total += sum(len(row.input_ids) for row in chosen)
    return total


def streamed(collator: fs.PackedCollator, rows: Iterable[Any]) -> int:
    """Tokens in the packs of a stream."""
    total = 0
    for pack in fs.PackedStream(rows, max_length=CAPACITY, num_replicas=1, rank=0):
        collator(pack)
        total += sum(len(row.input_ids) for row in pack)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tokenizer = trained_here(data_files())
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or "<|im_end|>"
    rows = list(chats(options.rows))
    rendered = [
        str(tokenizer.apply_chat_template(r["messages"], tools=r.get("tools"), tokenize=False)) for r in rows
    ]
    with tempfile.TemporaryDirectory() as folder:
        on_disk = fs.encode_dataset(rows, tokenizer, max_length=CAPACITY, cache_dir=folder, max_refused=1)
        encoded = list(on_disk)
        padding = fs.SFTCollator(tokenizer, max_length=CAPACITY, on_dropped="ignore")
        packing = fs.PackedCollator(max_length=CAPACITY)
        packs = list(fs.PackedSampler(on_disk.lengths, max_length=CAPACITY, num_replicas=1, rank=0))
        batches = groups(len(encoded))
        ways: dict[str, Callable[[], int]] = {
            "the tokenizer alone": lambda: bare(rows, tokenizer, rendered=rendered, batch_size=ROWS),
            "SFTCollator, chats": lambda: collated(padding, rows, groups(len(rows))),
            "SFTCollator, encoded rows": lambda: collated(padding, encoded, batches),
            "SFTCollator, encode_dataset": lambda: collated(padding, on_disk, batches),
            "PackedCollator, encoded rows": lambda: packed(packing, encoded, packs),
            "PackedCollator, encode_dataset": lambda: packed(packing, on_disk, packs),
            "PackedStream and PackedCollator, encoded rows": lambda: streamed(packing, encoded),
        }
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.times):
            for name, way in ways.items():
                start = time.perf_counter()
                tokens = way()
                speeds[name].append(tokens / (time.perf_counter() - start) / 1e6)
    alone = statistics.median(speeds["the tokenizer alone"])
    lines = [
        "`python -m benchmarks.speed.batches`: one core (`TOKENIZERS_PARALLELISM=false`), "
        f"{options.rows} real rows, median of {options.times}.",
        "",
        *table(
            ["way", "M tokens/s", "over the tokenizer alone"],
            [
                [name, f"{statistics.median(of):.2f}", f"{statistics.median(of) / alone:.2f}"]
                for name, of in speeds.items()
            ],
        ),
    ]
    publish("Batches", lines, options.output)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

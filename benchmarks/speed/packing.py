"""Sequence packing: seconds for a million lengths, how full packs are, and how evenly ranks are loaded.

    FSDP_SFT_DATA=folder python -m benchmarks.speed.packing

Fill is measured on real chat data, rendered and tokenised here with a byte-level BPE trained on it, against
the lower bound (all tokens over the capacity, rounded up) and against the packer of TRL (`pip install trl`;
left out where it is absent).
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from itertools import chain
from pathlib import Path

import torch

import fsdp_sft as fs
from benchmarks.tables import median_and_range, publish, table
from examples.tiny_model import make_tokenizer

CAPACITIES = (1024, 2048, 4096, 8192)
BUFFERS = (50, 200, 1000)


def drawn_lengths(kind: str, count: int, capacity: int) -> list[int]:
    generator = random.Random(0)
    if kind == "uniform":
        return [generator.randint(1, capacity) for _ in range(count)]
    return [min(capacity, 1 + int(generator.lognormvariate(6, 1))) for _ in range(count)]


def time_a_million(runs: int) -> list[str]:
    head = ["a million lengths at 4096", "seconds, median (min to max)", "CPU seconds", "packs"]
    rows = []
    for kind in ("log-normal", "uniform"):
        lengths = drawn_lengths(kind, 1_000_000, 4096)
        seconds, cpu_seconds = [], []
        for _ in range(runs):
            start, cpu_start = time.perf_counter(), time.process_time()
            packs = fs.pack_lengths(lengths, 4096)
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
        mean = statistics.mean(lengths)
        bound = math.ceil(sum(lengths) / 4096)
        taken = [median_and_range(seconds), median_and_range(cpu_seconds)]
        fill = f"{sum(lengths) / len(packs) / 4096:.3%}"
        rows.append([f"{kind}, mean {mean:.0f}", *taken, len(packs), bound, fill])
    return table([*head, "lower bound", "fill"], rows)


def read_chats(folder: Path) -> dict[str, list[dict]]:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jsonl"))
    return {
        path.name: json.loads(path.read_text())
        if path.suffix == ".json"
        else [json.loads(line) for line in path.read_text().splitlines()]
        for path in files
    }


def texts_of(value) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for part in parts for text in texts_of(part)]


def trl_packs(rows: list[fs.EncodedChat], capacity: int) -> int | None:
    try:
        import pyarrow as pa
        from datasets import Dataset, disable_caching
        from datasets.utils.logging import disable_progress_bar
        from trl import pack_dataset
    except ImportError:
        return None
    disable_caching()
    disable_progress_bar()
    columns = pa.table({"input_ids": [row.input_ids for row in rows]})
    # With a fingerprint given, datasets does not pickle the table, which fails with some versions of pyarrow.
    data = Dataset(columns, fingerprint="rows").to_iterable_dataset()
    # One batch: TRL packs each of its batches of a thousand rows by itself unless told otherwise.
    packed = list(pack_dataset(data, capacity, strategy="bfd", map_kwargs={"batch_size": len(rows)}))
    assert sum(len(pack["input_ids"]) for pack in packed) == sum(len(row.input_ids) for row in rows)
    return len(packed)


def stream_packs(rows: list[fs.EncodedChat], capacity: int, buffer_size: int) -> int:
    stream = fs.PackedStream(rows, max_length=capacity, buffer_size=buffer_size, num_replicas=1, rank=0)
    return sum(1 for _ in stream)


def fill_of_real_chats(chats: dict[str, list[dict]], tokenizer) -> list[str]:
    head = ["data", "rows", "capacity", "lower bound", "packs", "fill", "TRL's packs", "TRL's fill"]
    cells = []
    for name, part in [*chats.items(), ("all, shuffled", [*chain(*chats.values())])]:
        for capacity in CAPACITIES:
            rows = [fs.encode_chat(row, tokenizer, max_length=capacity) for row in part]
            random.Random(0).shuffle(rows)
            lengths, _ = fs.row_sizes(rows)
            room = sum(lengths) / capacity
            packs = len(fs.pack_lengths(lengths, capacity))
            theirs = trl_packs(rows, capacity)
            streamed = [stream_packs(rows, capacity, buffer_size) for buffer_size in BUFFERS]
            beside = [theirs, f"{room / theirs:.2%}"] if theirs else ["not installed", ""]
            ours = [packs, f"{room / packs:.2%}"]
            streams = [f"{room / number:.2%}" for number in streamed]
            cells.append([name, len(rows), capacity, math.ceil(room), *ours, *beside, *streams])
    return table([*head, *(f"stream, buffer {b}" for b in BUFFERS)], cells)


def imbalance(rounds: list[list[list[int]]], sizes: list[int]) -> tuple[float, float]:
    """(largest over mean of ranks, averaged over rounds; the same of the sums over all rounds)."""
    loads = [[sum(sizes[row] for row in pack) for pack in packs] for packs in rounds]
    totals = [sum(column) for column in zip(*loads, strict=True)]
    each = [max(load) * len(load) / sum(load) for load in loads if sum(load)]
    return statistics.mean(each), max(totals) * len(totals) / sum(totals)


def balance_of_ranks(rows: list[fs.EncodedChat], capacity: int) -> list[str]:
    lengths, targets = fs.row_sizes(rows)
    head = [f"ranks ({len(rows)} rows at {capacity})", "order", "rounds"]
    head += [f"{what}, {over}" for what in ("tokens", "targets") for over in ("a round", "in all")]
    cells = []
    for ranks in (2, 4, 8):
        dealt = [
            list(
                fs.PackedSampler(
                    lengths, max_length=capacity, num_targets=targets, num_replicas=ranks, rank=r
                )
            )
            for r in range(ranks)
        ]
        rounds = [list(packs) for packs in zip(*dealt, strict=True)]
        assert sorted(row for packs in rounds for pack in packs for row in pack) == list(range(len(rows)))
        plain = fs.pack_lengths(lengths, capacity)
        random.Random(0).shuffle(plain)
        whole = len(plain) // ranks * ranks
        as_they_come = [plain[i : i + ranks] for i in range(0, whole, ranks)]
        for order, some in (("PackedSampler", rounds), ("packs as they come", as_they_come)):
            figures = [*imbalance(some, lengths), *imbalance(some, targets)]
            cells.append([ranks, order, len(some), *(f"{figure:.4f}" for figure in figures)])
    return table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the tables there")
    args = parser.parse_args()
    if "FSDP_SFT_DATA" not in os.environ:
        parser.error("set FSDP_SFT_DATA to a folder of chat data, .json and .jsonl")
    load = f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    lines = [f"One thread, load {load}, Python {sys.version.split()[0]}, torch {torch.__version__}.", ""]
    lines += time_a_million(args.runs)
    chats = read_chats(Path(os.environ["FSDP_SFT_DATA"]))
    tokenizer = make_tokenizer(texts_of(list(chats.values())), vocab_size=16384)
    try:
        from trl import __version__ as trl_version

        theirs = f'TRL {trl_version} packed with strategy="bfd", all rows in one batch.'
    except ImportError:
        theirs = "TRL is not installed (`pip install trl`), so its columns are empty."
    lines += ["", f"Fill: tokens over packs x capacity; rows are cut to the capacity first. {theirs}", ""]
    lines += fill_of_real_chats(chats, tokenizer)
    every = [fs.encode_chat(row, tokenizer, max_length=2048) for row in chain(*chats.values())]
    lines += ["", 'Balance: the most loaded rank over the mean rank; 1 is even. "A round" is the mean over']
    lines += ["rounds, the last one included, in which packs of PackedSampler are split.", ""]
    lines += balance_of_ranks(every, 2048)
    publish("Sequence packing", lines, args.output)


if __name__ == "__main__":
    main()

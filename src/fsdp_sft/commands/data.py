"""``fsdp-sft inspect-data``: what of a file of chats would be trained, and which rows are refused."""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

_QUANTILES = (("median", 0.5), ("95 %", 0.95), ("longest", 1.0))


def inspect(args: argparse.Namespace) -> int:
    """Read the rows, encode them as training would, and print what was found."""
    from fsdp_sft._model.configs import tokenizer_of
    from fsdp_sft.collate import collator, encode, render

    rows = list(islice(_read(args.path), args.limit))
    tokenizer = tokenizer_of(args.tokenizer)
    options: dict[str, Any] = {
        "train_on": args.train_on,
        "chat_template": args.chat_template and args.chat_template.read_text(encoding="utf-8"),
        "max_length": args.max_length,
    }
    kept, counts = collator.filter_rows(rows, tokenizer, on_error="count", on_dropped="count", **options)
    chats = [encode.encode_chat(row, tokenizer, on_dropped="count", **options) for row in kept]
    report = _report(len(rows), counts, chats, args.max_length)
    if args.html is not None:
        ids, labels = [chat.input_ids for chat in chats[:50]], [chat.labels for chat in chats[:50]]
        args.html.write_text(render.render_labels_html(tokenizer, ids, labels, title=args.path.name))
    if args.json:
        print(json.dumps(report, indent=1))
        return 0
    print("\n".join(_text(args, report)))
    for number, chat in enumerate(chats[: args.show]):
        print(f"\n--- row {number} of those kept, trained part marked ---")
        print(render.render_labels(tokenizer, chat.input_ids, chat.labels, color=sys.stdout.isatty()))
    return 0


def _read(path: Path) -> Iterator[Any]:
    """The rows of a file.

    Raises:
        ValueError: For a line that is not JSON, with its number, or a file of JSON that is no list.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        rows = json.loads(text)
        if not isinstance(rows, list):  # the keys of an object would be read as rows
            raise ValueError(f"{path} must hold a list of rows, got {type(rows).__name__}")
        yield from rows
    for number, line in enumerate(text.split("\n") if path.suffix != ".json" else [], start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: {error}; a .jsonl file has one row a line"
                ) from error


def _report(rows: int, counts: Any, chats: list[Any], max_length: int | None) -> dict[str, Any]:
    """The numbers of the report, of rows after truncation."""
    from fsdp_sft.sampling.bins import pack_lengths

    lengths = sorted(len(chat.input_ids) for chat in chats)
    tokens = sum(lengths)
    packs = pack_lengths(lengths, max_length) if max_length else []
    return {
        "rows": rows,
        "counts": dict(counts),
        "examples": {reason: texts[:3] for reason, texts in counts.examples.items()},
        "tokens": tokens,
        "trained_tokens": sum(chat.num_targets for chat in chats),
        "quantiles": {
            name: lengths[min(int(share * len(lengths)), len(lengths) - 1)] for name, share in _QUANTILES
        },
        "packs": len(packs) if max_length else None,
        "pack_fill": tokens / (len(packs) * max_length) if max_length else None,
    }


def _text(args: argparse.Namespace, report: dict[str, Any]) -> Iterator[str]:
    """The report as lines of text."""
    from fsdp_sft.collate.collator import REFUSALS

    kept = report["counts"]["kept"]
    yield f"{args.path}: {report['rows']:,} rows, {kept:,} of them would be trained"
    for reason, texts in report["examples"].items():
        yield f"  {report['counts'][reason]:,} {reason}: {REFUSALS.get(reason, 'kept, but noted')}"
        yield from (f"    {text[:160]}" for text in texts[:1])
    tokens, trained = report["tokens"], report["trained_tokens"]
    yield f"tokens: {tokens:,}, {trained:,} of them trained ({trained / tokens:.0%})"
    yield "tokens of a row: " + ", ".join(f"{name} {size:,}" for name, size in report["quantiles"].items())
    if report["packs"] is not None:
        yield f"packs of {args.max_length:,} tokens: {report['packs']:,}, {report['pack_fill']:.1%} full"

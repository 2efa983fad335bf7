"""``fsdp-sft inspect-data``: what of a file of chats would be trained, and which rows are refused."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_sft.collate import EncodedChat


DESCRIPTION = (
    "What of a file of chats would be trained: rows that are refused and why, lengths, the share of trained "
    "tokens, how full packs are, and the first rows with their trained part marked."
)
_EXAMPLES = """examples:
  fsdp-sft inspect-data chats.jsonl --tokenizer Qwen/Qwen3-8B --max-length 4096
  fsdp-sft inspect-data chats.jsonl --tokenizer ./model --train-on last --html rows.html
  fsdp-sft inspect-data chats.jsonl --tokenizer ./base --chat-template chatml.jinja
  fsdp-sft inspect-data chats.jsonl --tokenizer ./model --json > report.json"""
_QUANTILES = (("median", 0.5), ("95 %", 0.95), ("longest", 1.0))


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``inspect-data`` to a parser."""
    parser.description, parser.epilog = DESCRIPTION, _EXAMPLES
    add = parser.add_argument
    add("path", type=Path, help="a .jsonl or .json file of rows, in any form that encode_chat takes")
    add("--tokenizer", required=True, help="Hugging Face folder or Hub id")
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja file to use instead of the tokenizer's template, as a base model needs",
    )
    add("--max-length", type=int, help="tokens of a row, and of a pack; default: rows as they are")
    add("--train-on", default="assistant", choices=("assistant", "last", "all"), help="default: assistant")
    add("--limit", type=int, default=10_000, help="rows to look at, from the first on; default: 10000")
    add("--show", type=int, default=2, metavar="N", help="rows to print; default: 2")
    add("--html", type=Path, metavar="FILE", help="write the first 50 rows as a page")
    add("--json", action="store_true", help="print the report as JSON, and nothing else")
    parser.set_defaults(run="commands.data:inspect")


def inspect(args: argparse.Namespace) -> int:
    """Read the rows, encode them as training would, and print what was found."""
    from fsdp_sft._model.configs import tokenizer_of
    from fsdp_sft.collate import REFUSALS, encode_chat, filter_rows, render_labels, render_labels_html

    rows = list(islice(_read(args.path), args.limit))
    if not rows:
        raise ValueError(f"{args.path} has no rows")
    tokenizer = tokenizer_of(args.tokenizer)
    template = None if args.chat_template is None else args.chat_template.read_text(encoding="utf-8")
    options: dict[str, Any] = {"train_on": args.train_on, "chat_template": template}
    kept, counts = filter_rows(
        rows, tokenizer, max_length=args.max_length, on_error="count", on_dropped="count", **options
    )
    options |= {"max_length": args.max_length, "on_dropped": "ignore"}
    chats = [encode_chat(row, tokenizer, **options) for row in kept]
    report = _report(len(rows), counts, chats, args.max_length)
    if args.html is not None:
        shown = chats[:50]
        page = render_labels_html(
            tokenizer, [c.input_ids for c in shown], [c.labels for c in shown], title=str(args.path.name)
        )
        args.html.write_text(page)
    if args.json:
        print(json.dumps(report, indent=1))
        return 0
    print("\n".join(_text(args, report)))
    refused = {index for reason in counts.indices if reason in REFUSALS for index in counts.indices[reason]}
    numbers = (number for number in range(len(rows)) if number not in refused)
    for number, chat in zip(numbers, chats[: args.show], strict=False):
        print(f"\n--- row {number}, trained part marked ---")
        print(render_labels(tokenizer, chat.input_ids, chat.labels, color=sys.stdout.isatty()))
    if args.html is not None:
        print(f"\nPage: {args.html}")
    return 0


def _read(path: Path) -> Iterator[Any]:
    """The rows of a file.

    Raises:
        ValueError: For a line that is not JSON, with its number, or a .json file that holds no list.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        found = json.loads(text)
        if not isinstance(found, list):
            raise ValueError(f"{path} must hold a list of rows, got {type(found).__name__}")
        yield from found
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: {error}; a .jsonl file has one row a line"
                ) from error


def _report(rows: int, counts: Any, chats: list[EncodedChat], max_length: int | None) -> dict[str, Any]:
    """The numbers of the report, of rows after truncation."""
    from fsdp_sft.sampling.packing import pack_lengths

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
    from fsdp_sft.collate import REFUSALS

    kept = report["counts"]["kept"]
    yield f"{args.path}: {report['rows']:,} rows, {kept:,} of them would be trained"
    for reason, texts in report["examples"].items():
        what = REFUSALS.get(reason, "kept, but noted")
        yield f"  {report['counts'][reason]:,} {reason}: {what}"
        yield from (f"    {text[:160]}" for text in texts[:1])
    share = report["trained_tokens"] / report["tokens"]
    yield f"tokens: {report['tokens']:,}, {report['trained_tokens']:,} of them trained ({share:.0%})"
    rows = ", ".join(f"{name} {tokens:,}" for name, tokens in report["quantiles"].items())
    yield f"tokens of a row: {rows}"
    if report["packs"] is not None:
        yield f"packs of {args.max_length:,} tokens: {report['packs']:,}, {report['pack_fill']:.1%} full"

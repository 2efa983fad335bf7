"""Show which tokens are trained, in a terminal or as a page of HTML."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from fsdp_sft.collate.layout import common_length
from fsdp_sft.errors import printable
from fsdp_sft.targets import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Ids = Sequence[int] | torch.Tensor

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: light-dark(#6b7280, #9ca3af); --page: light-dark(#fff, #15181c);
  --on: light-dark(#064e3b, #bbf7d0); --mark: light-dark(#d1fae5, #14532d);
  --line: light-dark(#e5e7eb, #2d333b); --strong: light-dark(#111827, #f3f4f6); }}
body {{ margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; }}
h1, h2 {{ color: var(--strong); font-weight: 600; }}
h1 {{ font-size: 1.4rem; }}
h2 {{ font-size: 1rem; margin: 0 0 .4rem; }}
h2 small {{ color: var(--ink); font-weight: 400; margin-left: .6rem; }}
section {{ border-top: 1px solid var(--line); padding: 1rem 0; }}
pre {{ margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; }}
mark {{ background: var(--mark); color: var(--on); border-radius: 2px; }}
i {{ font-style: normal; opacity: .45; }}
</style>
<h1>{title}</h1>
<p>{summary}. <mark>Trained text</mark> is green; the model reads the rest and is not trained on it.</p>
{rows}
</html>
"""
_ROW = "<section><h2>Row {number}<small>{summary}</small></h2><pre>{text}</pre></section>"


def render_labels(
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Ids,
    labels: Ids,
    *,
    color: bool = True,
) -> str:
    """Show which tokens are trained, for a terminal.

    Args:
        tokenizer: Decodes the ids.
        input_ids: Ids of one row, (S,).
        labels: Labels of the row, aligned with the ids, (S,).
        color: Whether to print trained text green and underlined and the rest dim; False puts trained text
            between ⟦ and ⟧ instead.

    Returns:
        The whole text, special tokens included; characters that would act on a terminal, and with
        ``color=False`` marks of the text itself, are written as escapes.

    Raises:
        ValueError: If a label is neither -100 nor the id at its position.

    Example:
        >>> chat = fs.encode_chat(rows[0], tokenizer)
        >>> print(fs.render_labels(tokenizer, chat.input_ids, chat.labels, color=False))
        <...⟦...⟧...
    """
    styles = {True: ("\x1b[32;4m", "\x1b[0m"), False: ("\x1b[2m", "\x1b[0m")}
    pieces = []
    for text, trained in _runs(tokenizer, _as_list(input_ids), _as_list(labels)):
        before, after = styles[trained] if color else ("⟦", "⟧") if trained else ("", "")
        shown = printable(text)
        if not color:  # marks that a text has itself are not ours
            shown = shown.replace("⟦", "\\u27e6").replace("⟧", "\\u27e7")
        pieces.append(before + shown + after)
    return "".join(pieces)


def render_labels_html(
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Sequence[Ids] | torch.Tensor,
    labels: Sequence[Ids] | torch.Tensor,
    *,
    attention_mask: Sequence[Ids] | torch.Tensor | None = None,
    title: str = "What is trained",
) -> str:
    """Show which tokens of a batch are trained, as a self-contained page of HTML.

    Args:
        tokenizer: Decodes the ids.
        input_ids: Token ids, (B, S), or B rows of any lengths.
        labels: Labels aligned with the ids, in the same shape.
        attention_mask: Mask in the same shape; tokens where it is 0 are not shown. None shows padding too.
        title: Heading of the page.

    Returns:
        The page, for a file in UTF-8. Line ends are marked with ↵.

    Raises:
        ValueError: If the shapes differ, or a label is neither -100 nor the id at its position.

    Example:
        >>> page = fs.render_labels_html(tokenizer, batch["input_ids"], batch["labels"])
        >>> Path("labels.html").write_text(page, encoding="utf-8") > 0
        True
    """
    masks: Sequence[Ids] | torch.Tensor = (
        [[1] * len(row) for row in input_ids] if attention_mask is None else attention_mask
    )
    rows, tokens, targets = [], 0, 0
    for number, (*columns, mask) in enumerate(zip(input_ids, labels, masks, strict=True)):
        ids, marks = (
            [item for item, keep in zip(_as_list(column), _as_list(mask), strict=True) if keep]
            for column in columns
        )
        count = sum(mark != IGNORE_INDEX for mark in marks[1:])
        tokens, targets = tokens + len(ids), targets + count
        rows.append(
            _ROW.format(
                number=number,
                summary=_counts(len(ids), count),
                text="".join(_as_html(*run) for run in _runs(tokenizer, ids, marks)),
            )
        )
    summary = f"{len(rows)} row{'s' * (len(rows) != 1)}, {_counts(tokens, targets)}"
    return _PAGE.format(title=html.escape(printable(title)), summary=summary, rows="\n".join(rows))


def _counts(tokens: int, targets: int) -> str:
    return f"{tokens:,} tokens, {targets:,} of them targets ({targets / max(tokens, 1):.1%})"


def _as_html(text: str, trained: bool) -> str:
    shown = html.escape(printable(text)).replace("\n", "<i>↵</i>\n")
    return f"<mark>{shown}</mark>" if trained else shown


def _as_list(values: Any) -> list[int]:
    return [int(item) for item in (values.tolist() if isinstance(values, torch.Tensor) else values)]


def _runs(tokenizer: PreTrainedTokenizerBase, ids: list[int], marks: list[int]) -> Iterator[tuple[str, bool]]:
    """(text, whether it is trained) of each run of tokens that are alike in that.

    Raises:
        ValueError: If a label is neither -100 nor its id.
    """
    expected = [token if mark != IGNORE_INDEX else mark for token, mark in zip(ids, marks, strict=False)]
    if len(ids) != len(marks) or marks != expected:
        raise ValueError(
            f"each label must be {IGNORE_INDEX} or the id at its position, got other labels; "
            "pass the labels of one row as encode_chat returns them, not shifted"
        )
    shown, position = "", 0
    for trained, run in groupby(mark != IGNORE_INDEX for mark in marks):
        position += len(list(run))
        # Decode from the beginning of the row: a run by itself would lose a space at its start, and a
        # character whose bytes lie in two runs would break.
        text = str(tokenizer.decode(ids[:position], clean_up_tokenization_spaces=False))
        text = text if position == len(ids) else text.rstrip("\ufffd")
        yield text[common_length(shown, text) :], trained
        shown = text

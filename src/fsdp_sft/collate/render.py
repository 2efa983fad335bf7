"""Which tokens are trained, for a person to see."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from fsdp_sft.collate.encode import IGNORE_INDEX
from fsdp_sft.collate.template import common_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_labels(
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Sequence[int] | torch.Tensor,
    labels: Sequence[int] | torch.Tensor,
    *,
    color: bool = True,
) -> str:
    """Show which tokens are trained, for a terminal.

    Args:
        tokenizer: Decodes the ids.
        input_ids: Ids of one row, (S,).
        labels: Labels of the row, aligned with the ids, (S,).
        color: Trained text green and underlined and the rest dim; False puts trained text in ⟦ and ⟧.

    Returns:
        The whole text, special tokens included.

    Raises:
        ValueError: If a label is neither -100 nor the id at its position.
    """
    ids, marks = (
        [int(item) for item in (values.tolist() if isinstance(values, torch.Tensor) else values)]
        for values in (input_ids, labels)
    )
    expected = [token if mark != IGNORE_INDEX else mark for token, mark in zip(ids, marks, strict=False)]
    if len(ids) != len(marks) or marks != expected:
        raise ValueError(
            f"each label must be {IGNORE_INDEX} or the id at its position, got other labels; "
            "pass the labels of one row as encode_chat returns them, not shifted"
        )
    styles = {True: ("\x1b[32;4m", "\x1b[0m"), False: ("\x1b[2m", "\x1b[0m")}
    pieces, shown, position = [], "", 0
    for trained, run in groupby(marks, key=lambda mark: mark != IGNORE_INDEX):
        position += len(list(run))
        # Decoding from the beginning keeps spaces, and characters whose bytes lie on both sides of an edge.
        text = str(tokenizer.decode(ids[:position], clean_up_tokenization_spaces=False))
        text = text if position == len(ids) else text.rstrip("\ufffd")
        before, after = styles[trained] if color else ("⟦", "⟧") if trained else ("", "")
        pieces.append(before + text[common_length(shown, text) :].replace("\x1b", "␛") + after)
        shown = text
    return "".join(pieces)

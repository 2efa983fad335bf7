"""Join rows into one packed sequence."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from fsdp_sft.collate.collator import padded
from fsdp_sft.collate.encode import EncodedChat, read_encoded
from fsdp_sft.collate.encoded import EncodedDataset
from fsdp_sft.collate.options import check_count
from fsdp_sft.targets import IGNORE_INDEX

Row = Mapping[str, Any] | EncodedChat


class PackedCollator:
    """Joins the rows of a pack into one sequence; for the ``collate_fn`` of a DataLoader.

    A model recognises the rows by ``position_ids``, which start at 0 in each of them, and by the absence of
    an attention mask; ``verify_packing`` measures whether it keeps them apart. The first label of every row
    is -100, since after the loss's shift it would be predicted from the last token of the previous row.

    Args:
        max_length: Most tokens of a pack; the same as for the sampler.
        pad_to_multiple_of: Rounds the length up to a multiple, beyond ``max_length`` if need be;
            ``max_length`` itself gives all packs that length. Padding is a further row at the end, of id 0
            and without targets.

    Raises:
        ValueError: For an option that is not allowed.

    Example:
        >>> collate = fs.PackedCollator(max_length=8, pad_to_multiple_of=8)
        >>> first, second = ({"input_ids": [n] * 3, "labels": [n] * 3} for n in (5, 6))
        >>> pack = collate([first, second])
        >>> pack["position_ids"].tolist(), pack["labels"].tolist()
        ([[0, 1, 2, 0, 1, 2, 0, 1]], [[-100, 5, 5, -100, 6, 6, -100, -100]])
    """

    def __init__(self, *, max_length: int, pad_to_multiple_of: int | None = None) -> None:
        self.max_length = check_count("max_length", max_length)
        self.pad_to_multiple_of = check_count(
            "pad_to_multiple_of", 1 if pad_to_multiple_of is None else pad_to_multiple_of
        )

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Join the rows of a pack.

        Args:
            rows: Rows with ``input_ids`` and ``labels`` of one length, or ``EncodedChat``s. No rows, as
                ``PackedSampler`` yields when none is left for a rank, make a batch without targets.

        Returns:
            ``input_ids``, ``labels`` and ``position_ids``, each int64 ``(1, S)``.

        Raises:
            ValueError: For a malformed row, or if the rows do not fit into ``max_length``.
        """
        chats = [read_encoded(row) for row in rows]
        lengths = [len(chat.input_ids) for chat in chats]
        total = sum(lengths)
        if total > self.max_length:
            raise ValueError(
                f"the {len(rows)} rows of a pack have {total} tokens, max_length is "
                f"{self.max_length}; give PackedSampler the same max_length, and the lengths of these rows"
            )
        # At least two tokens, the fewest with which a loss has something to shift.
        fewest = max(total, 2)
        length = fewest + -fewest % self.pad_to_multiple_of
        ids = chain.from_iterable(chat.input_ids for chat in chats)
        labels = chain.from_iterable([IGNORE_INDEX, *chat.labels[1:]] for chat in chats)
        return {
            "input_ids": padded([ids], length, 0),
            "labels": padded([labels], length, IGNORE_INDEX),
            "position_ids": torch.cat([torch.arange(size) for size in [*lengths, length - total]])[None],
        }


def row_sizes(rows: Iterable[Row]) -> tuple[list[int], list[int]]:
    """Length and number of targets of each row, for ``PackedSampler``.

    Args:
        rows: Rows with ``input_ids`` and ``labels`` of one length, or ``EncodedChat``s; or an
            ``EncodedDataset``, which stores them.

    Returns:
        (number of tokens of each row, number of targets of each row after the shift).

    Raises:
        ValueError: For a malformed row, with its index.

    Example:
        >>> fs.row_sizes([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}])
        ([3], [2])
        >>> lengths, num_targets = fs.row_sizes(dataset)
        >>> sampler = fs.PackedSampler(lengths, num_targets=num_targets, max_length=128)
    """
    if isinstance(rows, EncodedDataset):
        return rows.lengths.tolist(), rows.num_targets.tolist()
    lengths, targets = [], []
    for index, row in enumerate(rows):
        try:
            chat = read_encoded(row)
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from error
        lengths.append(len(chat.labels))
        targets.append(chat.num_targets)
    return lengths, targets

"""Rows to one packed sequence."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fsdp_sft.collate import IGNORE_INDEX, EncodedChat
from fsdp_sft.collate.rows import read_encoded
from fsdp_sft.packing.bins import check_count

Row = Mapping[str, Any] | EncodedChat


class PackedCollator:
    """Turns the rows of one pack into one sequence; for the ``collate_fn`` of a DataLoader.

    Rows stay apart by ``position_ids``, which start at 0 with each of them, and by there being no attention
    mask. Whether a model keeps them apart is for ``verify_packing`` to say. The first label of every row is
    -100: after the loss's shift it would be told from the last token of the row before. Rows may bring
    ``shift_labels``, the target of each position, in place of ``labels``; then the pack has them too.

    Args:
        max_length: Most tokens of a pack; what the sampler got.
        padding: "longest" pads nothing but what ``pad_to_multiple_of`` asks for, "max_length" pads to
            ``max_length``. Padding comes last, as a row of its own without targets.
        pad_to_multiple_of: Rounds the length up to a multiple, beyond ``max_length`` if need be.
        pad_token_id: What padding consists of; any id of the vocabulary will do.

    Raises:
        TypeError: If a number is no integer.
        ValueError: For an option that is not allowed.
    """

    def __init__(
        self,
        *,
        max_length: int,
        padding: str = "longest",
        pad_to_multiple_of: int | None = None,
        pad_token_id: int = 0,
    ) -> None:
        self.max_length = check_count("max_length", max_length)
        if padding not in ("longest", "max_length"):
            raise ValueError(f"padding must be 'longest' or 'max_length', got {padding!r}")
        self.padding = padding
        self.pad_to_multiple_of = check_count("pad_to_multiple_of", pad_to_multiple_of or 1)
        self.pad_token_id = check_count("pad_token_id + 1", pad_token_id + 1) - 1

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Join rows.

        Args:
            rows: Rows with ``input_ids`` and ``labels`` (or ``shift_labels``) of one length, or
                ``EncodedChat``s. No rows, which is what ``PackedSampler`` hands to a rank for which none is
                left, give a batch without targets.

        Returns:
            ``input_ids``, ``labels`` (or ``shift_labels``) and ``position_ids``, each int64 ``(1, S)``.

        Raises:
            ValueError: For a malformed row, or if the rows do not fit into ``max_length``.
        """
        if isinstance(rows, (Mapping, EncodedChat)):
            raise ValueError("a pack is a list of rows, got a single row; wrap it as [row]")
        input_ids: list[int] = []
        targets: list[int] = []
        position_ids: list[int] = []
        for ids, row_targets in map(_read, rows):
            input_ids += ids
            targets += row_targets
            position_ids += range(len(ids))
        if len(input_ids) > self.max_length:
            raise ValueError(
                f"the {len(rows)} rows of a pack have {len(input_ids)} tokens, max_length is "
                f"{self.max_length}; give PackedSampler the same max_length, and the lengths of these rows"
            )
        filler = self._padding(len(input_ids))
        input_ids += [self.pad_token_id] * filler
        targets += [IGNORE_INDEX] * filler
        position_ids += range(filler)
        columns = {"input_ids": input_ids, "position_ids": position_ids}
        if any(_is_shifted(row) for row in rows):
            columns["shift_labels"] = targets  # the last position may have one
        else:
            columns["labels"] = [IGNORE_INDEX, *targets[:-1]]
        return {name: torch.tensor([values], dtype=torch.int64) for name, values in columns.items()}

    def _padding(self, length: int) -> int:
        # Two tokens are the fewest that leave a loss anything to shift.
        target = self.max_length if self.padding == "max_length" else max(length, 2)
        return target + -target % self.pad_to_multiple_of - length


def row_sizes(rows: Iterable[Row]) -> tuple[list[int], list[int]]:
    """What ``PackedSampler`` needs to know about rows.

    Args:
        rows: Rows with ``input_ids`` and ``labels`` (or ``shift_labels``) of one length, or ``EncodedChat``s.

    Returns:
        (number of tokens of each row, number of targets of each row after the shift).

    Raises:
        ValueError: For a malformed row, with its index.
    """
    lengths, targets = [], []
    for index, row in enumerate(rows):
        try:
            ids, row_targets = _read(row)
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from error
        lengths.append(len(ids))
        targets.append(len(row_targets) - row_targets.count(IGNORE_INDEX))
    return lengths, targets


def _is_shifted(row: Row) -> bool:
    return isinstance(row, Mapping) and row.get("shift_labels") is not None


def _read(row: Row) -> tuple[list[int], list[int]]:
    """The ids of a row and the target of each position."""
    if isinstance(row, EncodedChat):
        row = {"input_ids": row.input_ids, "labels": row.labels}
    if not isinstance(row, Mapping) or "input_ids" not in row:
        got = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(
            f"a packed row needs input_ids and labels, got {got}; tokenise it with encode_chat first"
        )
    if _is_shifted(row):
        return read_encoded({"input_ids": row["input_ids"], "labels": row["shift_labels"]})
    ids, labels = read_encoded(row)
    return ids, [*labels[1:], IGNORE_INDEX]

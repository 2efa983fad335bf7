"""Checks of the first windows for mistakes in labels and rows that a falling loss would not show.

What is certainly a mistake raises an error; what may be intended causes one warning.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._model.record import record_of
from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft._ranks.mesh import CP, EP, TP, has_made_cp
from fsdp_sft.errors import BatchError, abridged
from fsdp_sft.loss import is_shifted
from fsdp_sft.step.once import first_time
from fsdp_sft.targets import IGNORE_INDEX

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WINDOWS = 3  # windows of a model that are checked
_FEWEST = 16  # fewest targets for which a mistake is reported
_VARIED = 8  # fewest different ids among them
_SHARE = 0.99  # share of the targets that must show the mistake
_OFF = "; check_labels=False if that is meant"
_WITH_CP = (
    "Samplers and windows without mesh= follow the mesh with cp that this process has made, and this model "
    "is not on it: give them mesh=build_mesh()"
)

_logger = logging.getLogger("fsdp_sft.step")


@dataclass
class _Looked:
    """Number of windows of a model that have been checked."""

    windows: int = 0


@dataclass(frozen=True)
class Differences:
    """Labels compared with the ids at their places.

    Attributes:
        compared: Number of labels that are not -100.
        different: Number of those that differ from the id at their place.
        padding: Number of those at places that the attention mask calls padding.
        unmasked: Places of padding tokens in rows without a mask that are trained, or that text attends to.
    """

    compared: int = 0
    different: int = 0
    padding: int = 0
    unmasked: int = 0


def is_to_be_looked_at(model: nn.Module) -> bool:
    """Whether the next window of ``model`` is one of the first three."""
    return record_of(model).kept_or_new(_Looked).windows < _WINDOWS


def look_at(micro_batches: list[Any], pad: int | None) -> Differences:
    """Refuse a window of this rank whose labels show a recognised mistake.

    Three mistakes are recognised: labels that have been shifted already, ``shift_labels`` that have not been
    shifted, and labels that are the attention mask. A shift is reported only from 16 targets on, if at least
    8 of them are different ids; places where an id equals the next one show nothing and do not count.

    Args:
        micro_batches: The window on this rank.
        pad: Id of the padding token; None if the model does not say.

    Raises:
        BatchError: If there is such a mistake.
    """
    batches = [
        b for b in micro_batches if isinstance(b, Mapping) and isinstance(b.get("input_ids"), torch.Tensor)
    ]
    for batch in batches:
        _refuse_mask(batch)
    plain = [batch for batch in batches if not is_shifted(batch)]
    _refuse_shift(plain, "labels")
    _refuse_shift([batch for batch in batches if is_shifted(batch)], "shift_labels")
    compared = different = padding = unmasked = 0
    for batch in plain:
        held = batch["labels"] != IGNORE_INDEX
        compared += int(held.sum())
        different += int((held & (batch["labels"] != batch["input_ids"])).sum())
        mask = batch.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape == held.shape:
            padding += int((held & (mask == 0)).sum())
        elif mask is None and pad is not None and "position_ids" not in batch:
            unmasked += _unmasked(batch["input_ids"], held, pad)
    return Differences(compared, different, padding, unmasked)


def _unmasked(ids: torch.Tensor, held: torch.Tensor, pad: int) -> int:
    """Places at the ends of rows that hold padding and no mask, where it is trained or attended to.

    One such token at an end may end the text, since many models pad with that; so only runs of two or more
    count, without the first or last of them. Padding on the right that is not trained harms nothing.
    """
    padding = ids == pad
    right = padding.flip(1).cumprod(1).flip(1).bool()
    left = padding.cumprod(1).bool() & ~right
    text = right & ~right.roll(1, 1)  # the first of the run
    return int((right & ~text & held).sum()) + int((left & left.roll(-1, 1)).sum())


def say_what_was_seen(
    model: nn.Module, micro_batches: list[Any], everywhere: Differences, mesh: "DeviceMesh | None"
) -> None:
    """Warn of what may be a mistake: labels of padding or unlike their ids, and ranks with the same rows.

    Args:
        model: Model that is trained; in its first window the rows of all ranks are compared.
        micro_batches: This rank's micro-batches.
        everywhere: Sum over the ranks of what ``look_at`` returned.
        mesh: Ranks that share the window.

    Collective: all ranks of the mesh.
    """
    looked = record_of(model).kept_or_new(_Looked)
    looked.windows += 1
    first = mesh is None or mesh.get_rank() == 0
    if everywhere.different and first and first_time(model, "labels"):
        _logger.warning(
            "%d of %d labels differ from the id at their place (%.1f %%): right for corrupted inputs or "
            "placeholders, and otherwise a mistake; look at a row with render_labels",
            *(everywhere.different, everywhere.compared),
            100 * everywhere.different / everywhere.compared,
        )
    if everywhere.padding and first and first_time(model, "padding"):
        _logger.warning(
            "%d of %d labels are of padding (attention_mask 0), which the model would learn to write: set "
            "them to -100, as SFTCollator does",
            *(everywhere.padding, everywhere.compared),
        )
    if everywhere.unmasked and first and first_time(model, "unmasked"):
        _logger.warning(
            "%d places at the ends of rows hold the model's pad_token_id, and the batch has no "
            "attention_mask: the model would learn to write padding, or read it before the text. Give the "
            "mask, and labels of -100 there, as SFTCollator does",
            everywhere.unmasked,
        )
    if looked.windows == 1 and mesh is not None and mesh.size() > 1:
        _compare_rows(micro_batches, mesh, first)


def _compare_rows(micro_batches: list[Any], mesh: "DeviceMesh", first: bool) -> None:
    """Warn of ranks that have the same rows and should not."""
    names: Any = mesh.mesh_dim_names or ()
    place: Any = mesh.get_coordinate() or ()
    data_place = tuple(
        at for index, at in enumerate(place) if index >= len(names) or names[index] not in (CP, TP, EP)
    )
    alike: dict[bytes, list[tuple[int, tuple[int, ...]]]] = {}
    for rank, (at, rows) in enumerate(all_gather_objects((data_place, _digest_of_rows(micro_batches)))):
        if rows:  # windows without a target have no digest and are not compared
            alike.setdefault(rows, []).append((rank, at))
    for same in alike.values():
        if len({at for _, at in same}) > 1 and first:
            _logger.warning(
                "ranks %s have the same rows in the first window: each gradient counts them so often. %s",
                abridged(str(rank) for rank, _ in same),
                _WITH_CP
                if CP not in names and has_made_cp()
                else "Give the loader a sampler that shares rows out, such as ResumableSampler",
            )


def _digest_of_rows(micro_batches: list[Any]) -> bytes:
    """Digest of the ids and labels, eight bytes; empty for a window without a target."""
    digest = hashlib.blake2b(digest_size=8)
    targets = False
    for batch in micro_batches:
        for name in ("input_ids", "labels", "shift_labels"):
            value = batch.get(name) if isinstance(batch, Mapping) else None
            if isinstance(value, torch.Tensor):
                digest.update(repr(tuple(value.shape)).encode())
                digest.update(value.detach().to("cpu", torch.int64).contiguous().numpy().tobytes())
                targets = targets or (name != "input_ids" and bool((value != IGNORE_INDEX).any()))
    return digest.digest() if targets else b""


def _refuse_shift(batches: list[Any], name: str) -> None:
    """Refuse ``labels`` that equal the next ids, or ``shift_labels`` that equal the ids at their places."""
    right = wrong = 0
    values: list[torch.Tensor] = []
    for batch in batches:
        own, following = batch["input_ids"][:, :-1], batch["input_ids"][:, 1:]
        labels = batch[name][:, :-1]
        telling = (labels != IGNORE_INDEX) & (own != following)
        meant, mistaken = (own, following) if name == "labels" else (following, own)
        wrong += int((telling & (labels == mistaken)).sum())
        right += int((telling & (labels != mistaken)).sum())
        values.append(labels[telling & (labels == mistaken) & (labels != meant)])
    if wrong + right < _FEWEST or wrong <= _SHARE * (wrong + right):
        return
    if len(torch.cat(values).unique()) < _VARIED:
        return
    if name == "labels":
        raise BatchError(
            f"labels equal the next id at {wrong} of {wrong + right} targets: they have been shifted already "
            "and the loss shifts them itself. Give labels aligned with input_ids, or what you have as "
            "shift_labels" + _OFF
        )
    raise BatchError(
        f"shift_labels equal the id at their own place at {wrong} of {wrong + right} targets: they have not "
        "been shifted. Give them as labels, which the loss shifts" + _OFF
    )


def _refuse_mask(batch: Mapping[str, Any]) -> None:
    """Refuse labels that are the attention mask, even if the field of the mask holds something else."""
    name = "shift_labels" if is_shifted(batch) else "labels"
    labels, mask = batch[name], batch.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.shape != labels.shape or labels.numel() < _FEWEST:
        return
    if not bool(((labels == 0) | (labels == 1)).all()) or torch.equal(labels, batch["input_ids"]):
        return
    is_mask = bool(((mask == 0) | (mask == 1)).all())
    if torch.equal(labels, mask.to(labels.dtype)) or not is_mask:
        raise BatchError(
            f"{name} consist of 0 and 1 and "
            + ("equal the attention mask" if is_mask else "the attention mask of other numbers")
            + ": two fields of the batch have been exchanged, and the model would learn to say token 1"
            + _OFF
        )

"""A window's micro-batches, measured on the host, and what the ranks agree on before the first forward.

The keys of a batch are compared, because a forward runs the modules that its arguments need. If one rank's
batch has an image and another's has none, the first gathers the parameters of the vision tower and the second
never does, so the job hangs, or gloo aborts it.
"""

import copy
import hashlib
import logging
import math
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_sft._model.view import tensors_in
from fsdp_sft._process.generators import unmoved
from fsdp_sft._process.streams import host_copies, travelling
from fsdp_sft._ranks.agree import all_gather_objects, difference, through_rank_0
from fsdp_sft._ranks.mesh import place_of_rows, shares_rows_elsewhere
from fsdp_sft.errors import BatchError, abridged
from fsdp_sft.jobs.preemption import keep_workers_alive
from fsdp_sft.loss import (
    LABEL_KEYS,
    LOSS_KEYS,
    WEIGHTS_KEY,
    BatchPart,
    CheckedBatch,
    Rows,
    facts_of,
    num_targets,
    num_tokens,
    targets_of,
    weight_of,
)
from fsdp_sft.sampling.verify import verify_first_pack, verify_left_padding
from fsdp_sft.step.objective import Objective

Keys = tuple[str, ...]
_LOOKED_AT = (*LOSS_KEYS, "input_ids", "attention_mask", "position_ids")
_logger = logging.getLogger("fsdp_sft.step")
_SUMMED = ("targets", "tokens", "weight", "padded_left")  # of micro-batches, over a window


@dataclass(frozen=True)
class MicroBatch:
    """One batch of this rank, and its share of what is counted.

    Attributes:
        given: The batch as the caller gave it.
        seen: The same, with copies in host memory of the tensors that are checked.
        part: What this rank computes of ``seen``, where the loss is the library's; if not, ``seen`` itself.
        keys: Its keys, as ``keys_of`` names them; the same on every rank.
        targets: Number of its targets, or what a ``count_fn`` returned.
        weight: Sum of the targets' ``loss_weights``; without weights ``targets``.
        tokens: Number of its tokens, without padding.
        padded_left: Whether it has a row that is padded on the left.
    """

    given: Any
    seen: Any
    part: Any
    keys: Keys
    targets: float
    weight: float
    tokens: int
    padded_left: bool

    def on_device(self, device: torch.device, *, own_loss: bool) -> Any:
        """The batch on ``device``, as a forward takes it, with what the host knows of its targets."""
        if isinstance(self.part, BatchPart):
            return self.part.on_device(device)
        moved = to_device(self.given, device)
        if own_loss or device.type == "cpu":
            return moved
        return CheckedBatch(moved, facts_of(targets_of(self.seen).reshape(-1), device))


def measured(batches: Sequence[Any], objective: Objective, rows: Rows) -> list[MicroBatch]:
    """The batches, counted on the host, which waits once for those that are on a device.

    What is asked of whole rows, by a function of the caller's, the first of the ranks that share them counts.

    Args:
        batches: Batches of this rank.
        objective: Definition of the loss. A batch without ``input_ids`` is an error, unless the loss is the
            caller's own: it then counts as 0 tokens.
        rows: How ranks have the rows of the batches; each counts the targets and tokens of its part.
    """
    is_own, first = objective.is_own, rows.rank == 0
    found = []
    for given, seen in zip(batches, on_host(batches), strict=True):
        part = seen if is_own else rows.part(seen)
        targets = num_targets(part) if objective.count_fn is None else float(objective.count_fn(given))
        if not 0 <= targets < math.inf:
            raise ValueError(f"count_fn must return a batch's targets, or their weight, got {targets}")
        targets = targets if first or objective.knows_accuracy else 0.0
        counts = not is_own and objective.count_fn is None  # which says by what a loss is divided
        weighted = counts and isinstance(part, Mapping) and part.get(WEIGHTS_KEY) is not None
        weight = weight_of(part) if weighted else targets
        tokens = num_tokens(part, needs_ids=not is_own) if first or not is_own else 0
        found.append(
            MicroBatch(given, seen, part, keys_of(seen), targets, weight, tokens, _is_padded_on_left(seen))
        )
    return found


def _is_padded_on_left(batch: Any) -> bool:
    """Whether the mask of a batch on the host leaves out the first column of a row but not all of it."""
    mask: Any = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return (
        isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool(((mask[:, :1] == 0) & (mask != 0)).any())
    )


@dataclass(frozen=True)
class Window:
    """Facts about a window before its first forward, the same on all ranks but for its micro-batches.

    Attributes:
        targets: Number of targets on all ranks; of a ``count_fn`` that returns weights, their sum, rounded.
        tokens: Number of tokens on all ranks, without padding.
        weight: Sum of the targets' ``loss_weights`` on all ranks; without weights the number of targets.
        padded_left: Whether any rank has a row that is padded on the left.
        pack: Tokens of the largest pack on any rank for which the model is to be verified; 0 for none.
        sender: The first rank that has a micro-batch; -1 if none has.
        lacks: Whether a rank has neither a micro-batch nor one ``held`` with the keys of the others'.
        micro_batches: Those of this rank.
    """

    targets: int
    tokens: int
    weight: float
    padded_left: bool
    pack: int
    sender: int
    lacks: bool
    micro_batches: list[MicroBatch]


def agree_on_window(
    micro_batches: Iterable[Any],
    mesh: DeviceMesh | None,
    objective: Objective,
    *,
    check: Callable[[list[Any]], int] | None,
    rows: Rows,
    options: dict[str, Any],
    held: Sequence[MicroBatch] = (),
    compare_rows: bool = False,
) -> Window:
    """Check the window and agree on it, or raise the same error on all ranks; one small exchange.

    Args:
        micro_batches: This rank's micro-batches; an error in reading them reaches all ranks.
        mesh: Mesh of the model, whose ranks share the window; None is this rank alone.
        objective: Definition of the loss.
        check: Function that raises if the model cannot be trained, or not with these batches on the host, and
            returns their ``unverified_pack``.
        rows: How ranks have the rows of the batches.
        options: Options of the call that must be the same on every rank.
        held: What this rank can run, without counting it, if it has no micro-batch.
        compare_rows: Whether to look for other rows on ranks that share them, and for the same on others.

    Raises:
        BatchError: If ranks differ in the options, those that have batches in the keys of these, or those
            that share rows in these.

    Collective: all ranks, if there is a mesh.
    """
    batches: list[MicroBatch] = []
    compares = compare_rows and mesh is not None and mesh.size() > 1

    def told() -> dict[str, Any]:
        batches.extend(measured(list(micro_batches), objective, rows))
        return {
            "pack": 0 if check is None else check([one.seen for one in batches]),
            "sums": [sum(getattr(one, name) for one in batches) for name in _SUMMED],
            "options": _digest(options),
            "has": bool(batches),
            "keys": _digest(_keys_by_place(batches or held)),
            "rows": digest_of_rows(batches) if compares else b"",
            "place": place_of_rows(mesh) if compares else (),
        }

    decide = partial(_together, mesh if compares else None)
    (targets, tokens, weight, padded_left), pack, sender, lacks, different = (
        decide([told()])
        if mesh is None
        else through_rank_0("checking the window and the model", told, decide)
    )
    if different:
        refuse_different(different, options if different == "options" else _keys_by_place(batches))
    return Window(round(targets), int(tokens), weight, padded_left > 0, pack, sender, lacks, batches)


def _keys_by_place(batches: Sequence[MicroBatch]) -> dict[str, Keys]:
    """The keys of each micro-batch."""
    return {f"micro-batch {index}": one.keys for index, one in enumerate(batches)}


def _together(compared: Any, everyone: list[dict[str, Any]]) -> tuple[list[float], int, int, bool, str]:
    """(sums, largest pack to verify, first rank with batches or -1, whether one lacks any, what differs)."""
    total = [sum(column) for column in zip(*(one["sums"] for one in everyone), strict=True)]
    sender = next((rank for rank, one in enumerate(everyone) if one["has"]), -1)
    keys = {one["keys"] for one in everyone if one["has"]}
    options = {one["options"] for one in everyone}
    different = "options" if len(options) > 1 else "keys" if len(keys) > 1 else ""
    if compared is not None and not different:
        _compare_rows(everyone, compared)
    return (
        total,
        max(one["pack"] for one in everyone),
        sender,
        any(one["keys"] not in keys for one in everyone),
        different,
    )


def _compare_rows(everyone: list[dict[str, Any]], mesh: Any) -> None:
    """Refuse ranks that share rows and have different ones; warn of the same rows where others should be.

    Raises:
        BatchError: If ranks of one ``cp`` or ``tp`` group have different rows.
    """
    pairs = {(one["place"], one["rows"]) for one in everyone}
    if len(pairs) > len({place for place, _ in pairs}):
        raise BatchError(
            "ranks of one cp group have different batches, and each computes a part of the same rows: "
            "iterate with windows(loader, n, mesh=mesh), whose first rank of a group reads for all of it, or "
            "give samplers mesh=mesh, and collators nothing random that ranks draw by themselves. Ranks of "
            "one tp group need the same batches too: give samplers num_replicas= and rank= without tp"
        )
    for rows in {one["rows"] for one in everyone if one["rows"] and one["sums"][0]}:
        same = {str(rank): one["place"] for rank, one in enumerate(everyone) if one["rows"] == rows}
        if len(set(same.values())) > 1:
            _logger.warning(
                "ranks %s have the same rows in the first window: each gradient counts them so often. %s",
                abridged(same),
                "Samplers and windows without mesh= follow the mesh with cp that this process has made, and "
                "this model is not on it: give them mesh=build_mesh()"
                if shares_rows_elsewhere(mesh)
                else "Give the loader a sampler that shares rows out, such as ResumableSampler",
            )


def _digest(value: Any) -> bytes:
    """Eight bytes, equal for equal values and (nearly always) different for others."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).digest()


def keys_of(batch: Any) -> Keys:
    """The sorted keys of a batch, without those whose value is None.

    ``shift_labels`` count as ``labels``, because the loss handles both. ``loss_weights`` do not count: some
    ranks may have them and others not. A batch that is not a mapping (for a ``loss_fn``) has one key, which
    names its type.
    """
    if isinstance(batch, Mapping):
        named = (
            "labels" if key in LABEL_KEYS else str(key)
            for key, value in batch.items()
            if value is not None and key != WEIGHTS_KEY
        )
        return tuple(sorted(set(named)))
    return (f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""),)


def metrics_over_mesh(names: Iterable[str], sums: list[float], mesh: DeviceMesh | None) -> dict[str, float]:
    """The sums of metrics over all ranks; a name counts as 0 where a rank lacks it.

    Collective: all ranks of the mesh.
    """
    own = dict(zip(names, sums, strict=True))
    every = [own] if mesh is None else all_gather_objects(own)
    return {name: sum(one.get(name, 0.0) for one in every) for name in sorted(set().union(*every))}


def refuse_different(what: str, own: dict[str, Any]) -> NoReturn:
    """Raise the error that says in which options of a call, or keys of its batches, ranks differ.

    Args:
        what: ``"options"`` or ``"keys"``.
        own: Those of this rank by name; empty if it has none to compare.

    Collective: all ranks; all must know that theirs differ.
    """
    apart = difference([(rank, one) for rank, one in enumerate(all_gather_objects(own)) if one])
    advice = (
        "windows() ends all ranks together"
        if what == "options"
        else "a forward that is given other keys may run other modules, and ranks then wait for each other. "
        "A row without an image gets a blank one, or a sampler hands rows of one kind to all ranks at a time"
    )
    raise BatchError(f"ranks have different {what} ({apart}); give all of them the same: {advice}")


def begun_late(batches: Iterable[Any], *, goes_on: bool = False) -> Iterator[Any]:
    """The batches of a loader, whose workers start with the first: where an error reaches all ranks.

    A pass that goes on in mid-epoch leaves torch's generator, from which a loader draws a seed as it begins:
    the job that was not interrupted drew it before what it goes on from, and dropout draws there too.
    """
    with unmoved() if goes_on else nullcontext():
        begun = keep_workers_alive(batches)
    yield from begun


def on_host(batches: Sequence[Any]) -> list[Any]:
    """The batches, with the tensors that are checked before a forward in host memory.

    Tensors that a loader has moved to a device are copied back; the host waits for all of them at once.
    """
    checked: list[dict[str, torch.Tensor]] = [
        {name: batch[name] for name in _LOOKED_AT if isinstance(batch.get(name), torch.Tensor)}
        if isinstance(batch, Mapping)
        else {}
        for batch in batches
    ]
    copies = iter(host_copies([tensor for one in checked for tensor in one.values()]))
    return [
        {**batch, **{name: next(copies) for name in one}} if one else batch
        for batch, one in zip(batches, checked, strict=True)
    ]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``, those in nested dicts, lists and tuples included.

    What is none of these and can move itself, such as a TensorDict, is moved by its own ``to``.
    """
    if isinstance(batch, UserDict):
        made = copy.copy(batch)  # a BatchEncoding, whose parts are its attributes too
        made.data = to_device(batch.data, device)
        return made
    if callable(getattr(batch, "to", None)) and not isinstance(batch, torch.Tensor):
        return copy.copy(batch).to(device)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [to_device(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return travelling(batch, device) if isinstance(batch, torch.Tensor) else batch


def num_rows(batch: Any) -> int:
    """Number of rows of a batch: the length of its ``input_ids``, or else of the first tensor in it."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    first = ids if isinstance(ids, torch.Tensor) else next((t for t in tensors_in(batch) if t.ndim), None)
    if first is None:
        raise BatchError(f"the rows of a batch without a tensor cannot be counted: {type(batch).__name__}")
    return len(first)


def digest_of_rows(micro_batches: list[MicroBatch]) -> bytes:
    """Digest of the tensors of a window, eight bytes; empty if there is none."""
    tensors = [tensor for one in micro_batches for tensor in tensors_in(one.seen) if tensor.ndim]
    rows = [row for tensor in tensors for row in (tensor.unbind() if tensor.is_nested else (tensor,))]
    digest = hashlib.blake2b(digest_size=8)
    for row in host_copies(rows):
        digest.update(f"{row.dtype} {tuple(row.shape)}".encode())
        digest.update(row.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest() if rows else b""


def verify_rows(
    model: nn.Module,
    micro_batches: list[MicroBatch],
    window: Window,
    objective: Objective,
    mesh: DeviceMesh | None,
) -> None:
    """Verify, once for a model, that it takes packs and rows that are padded on the left.

    Args:
        model: Model that gets the batches.
        micro_batches: Batches of this rank, its own or stand-ins.
        window: What the ranks have agreed on.
        objective: Definition of the loss; the caller's own reads padding as it likes.
        mesh: Ranks that share the batches.

    Collective: all ranks of the mesh.
    """
    verify_first_pack(model, window.pack, mesh)
    if window.padded_left and not objective.is_own:
        verify_left_padding(
            model, mesh, with_positions=any("position_ids" in one.keys for one in micro_batches)
        )

"""Facts about a window's micro-batches that ranks agree on before the first forward."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fsdp_sft._process.streams import host_copies, travelling
from fsdp_sft._ranks.mesh import copies_of_rows, raise_on_mesh, sum_over_mesh
from fsdp_sft.attention.context_parallel import SequenceGroup
from fsdp_sft.errors import BatchError
from fsdp_sft.jobs.preemption import keep_workers_alive
from fsdp_sft.loss import (
    LOSS_KEYS,
    BatchPart,
    checked_batch,
    part_on_device,
)
from fsdp_sft.sampling.padding import is_padded_on_left
from fsdp_sft.step.keys import (
    Keys,
    are_equal,
    digest,
    keys_of,
    refuse_different_keys,
    refuse_different_options,
    to_compare,
)
from fsdp_sft.step.objective import Objective

Check = Callable[[Any], None]

_LOOKED_AT = (*LOSS_KEYS, "input_ids", "attention_mask", "position_ids")

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class MicroBatch:
    """One batch of a window on this rank.

    Attributes:
        given: The batch as the caller gave it.
        seen: The same, with copies in host memory of the tensors that are checked.
        part: This rank's part of ``seen`` under context parallelism, where the loss is the library's; if not,
            ``seen`` itself.
        keys: Its keys, as ``keys_of`` names them; the same on every rank.
    """

    given: Any
    seen: Any
    part: Any
    keys: Keys


@dataclass(frozen=True)
class Window:
    """Facts about a window before its first forward, the same on all ranks but for its micro-batches.

    Attributes:
        targets: Number of targets on all ranks; of a ``count_fn`` that returns weights, their sum, rounded.
        tokens: Number of tokens on all ranks, without padding.
        weight: Sum of the targets' ``loss_weights`` on all ranks; without weights the number of targets.
        padded_left: Whether any rank has a row that is padded on the left.
        micro_batches: Those of this rank.
    """

    targets: int
    tokens: int
    weight: float
    padded_left: bool
    micro_batches: tuple[MicroBatch, ...]

    @property
    def seen(self) -> list[Any]:
        """``MicroBatch.seen`` of each micro-batch."""
        return [one.seen for one in self.micro_batches]


def agree_on_window(
    micro_batches: list[Any],
    mesh: "DeviceMesh | None",
    objective: Objective,
    *,
    check: Callable[[list[Any]], None],
    group: SequenceGroup | None,
    options: dict[str, Any],
) -> Window:
    """Check the window and agree on it, or raise the same error on all ranks; one small all-reduce.

    Args:
        micro_batches: This rank's micro-batches.
        mesh: Mesh of the model, whose ranks share the window; None is this rank alone.
        objective: Definition of the loss. A batch without ``input_ids`` is an error, unless the loss is the
            caller's own: it then counts as 0 tokens.
        check: Function that raises if the model cannot be trained, or not with these batches on the host.
        group: Ranks that share the rows; each counts the targets and tokens of its part.
        options: Options of the step that must be the same on every rank.

    Collective: all ranks, if there is a mesh.
    """
    error: Exception | None = None
    targets, weight, tokens, padded_left = 0.0, 0.0, 0, False
    batches: list[MicroBatch] = []
    try:
        given = _checked_window(micro_batches)
        seen = on_host(given)
        for batch, copied in zip(given, seen, strict=True):
            one = MicroBatch(batch, copied, objective.part(copied, group), keys_of(copied))
            batches.append(one)
            count, own_weight, own_tokens = objective.measured(one.given, one.part, group)
            targets, weight, tokens = targets + count, weight + own_weight, tokens + own_tokens
        padded_left = any(map(is_padded_on_left, seen))
        check(seen)
    except Exception as caught:
        error = caught
    ranks = mesh.size() if mesh is not None else 1
    keys = [one.keys for one in batches]
    compared = to_compare([*digest(repr(options)), len(keys), *digest(keys)])
    own = [weight, targets, tokens, padded_left, error is not None]
    all_weight, all_targets, all_tokens, left, failed, *equal = sum_over_mesh([*own, *compared], mesh)
    copies = copies_of_rows(mesh)
    if failed:
        raise_on_mesh(error, "checking the window and the model", mesh)
    if not are_equal(equal[:-8], ranks):
        refuse_different_options(options)
    equal = equal[-8:]  # of the number of micro-batches, and of their keys
    if not are_equal(equal[:2], ranks):
        raise BatchError(
            f"ranks have different numbers of micro-batches (this one {len(keys)}, {equal[0] / ranks:.2f} on "
            "average); iterate with windows(), which ends all ranks together"
        )
    if not are_equal(equal, ranks):
        refuse_different_keys(keys)
    tokens, weight = int(all_tokens) // copies, all_weight / copies
    return Window(round(all_targets / copies), tokens, weight, left > 0, tuple(batches))


def _checked_window(micro_batches: Any) -> list[Any]:
    """The window as a list; raises for a single batch and for an empty window."""
    if isinstance(micro_batches, Mapping) or not isinstance(micro_batches, (list, tuple)):
        raise BatchError(
            f"train_step takes the window as a list of batches, got {type(micro_batches).__name__}; "
            "wrap a single batch as [batch]"
        )
    if not micro_batches:
        raise BatchError("train_step got an empty window; it needs at least one micro-batch")
    return list(micro_batches)


def begun_late(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader, whose workers start with the first: where an error reaches all ranks."""
    yield from keep_workers_alive(batches)


def on_host(batches: Sequence[Any]) -> list[Any]:
    """The batches, with the tensors that are checked before a forward in host memory.

    Tensors that a loader has moved to a device are copied back; the host waits for all of them at once.
    """
    places = [
        (index, name)
        for index, batch in enumerate(batches)
        for name in _LOOKED_AT
        if isinstance(batch, Mapping) and isinstance(batch.get(name), torch.Tensor) and not batch[name].is_cpu
    ]
    found = [dict(batch) if isinstance(batch, Mapping) and places else batch for batch in batches]
    copies = host_copies([batches[index][name] for index, name in places])
    for (index, name), copied in zip(places, copies, strict=True):
        found[index][name] = copied
    return found


def on_device(batch: Any, seen: Any, device: torch.device, *, own_loss: bool) -> Any:
    """The batch on ``device``, as a forward takes it, with what the host knows of its targets."""
    if isinstance(seen, BatchPart):
        return part_on_device(seen, device)
    moved = to_device(batch, device)
    return moved if own_loss or device.type == "cpu" else checked_batch(moved, seen, device)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``, those in nested dicts, lists and tuples included.

    What is none of these and can move itself, such as a TensorDict, is moved by its own ``to``.
    """
    if isinstance(batch, torch.Tensor):
        return travelling(batch, device)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, UserDict):
        return copy.copy(batch).to(device)
    return with_parts(batch, lambda part: to_device(part, device))


def with_parts(value: Any, function: Callable[[Any], Any]) -> Any:
    """A mapping, list or tuple with ``function`` of each of its parts; anything else as it is."""
    if isinstance(value, Mapping):
        parts = {name: function(inner) for name, inner in value.items()}
        if not isinstance(value, UserDict):
            return parts
        made = copy.copy(value)  # a BatchEncoding, whose parts are its attributes too
        made.data = parts
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    return type(value)(map(function, value)) if isinstance(value, (list, tuple)) else value


def num_rows(batch: Any) -> int:
    """Number of rows of a batch: the length of its ``input_ids``, or else of the first tensor in it."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    first = ids if isinstance(ids, torch.Tensor) else next(_tensors_in(batch), None)
    if first is None:
        raise BatchError(f"the rows of a batch without a tensor cannot be counted: {type(batch).__name__}")
    return len(first)


def _tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch that have rows, those in its dicts, lists and tuples included."""
    if isinstance(batch, torch.Tensor):
        if batch.ndim:
            yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors_in(part)

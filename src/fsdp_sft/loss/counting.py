"""Targets: which labels count, how many there are, and the scale that makes each weigh the same."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.nn import functional as F

from fsdp_sft._agree import all_reduce_sum, world_size
from fsdp_sft._meshes import has_context_parallelism
from fsdp_sft._streams import travelling
from fsdp_sft.collate import IGNORE_INDEX, filler_of
from fsdp_sft.context_parallel import sequence_group_in
from fsdp_sft.distributed import sum_over_mesh
from fsdp_sft.errors import BatchError
from fsdp_sft.loss.same_rows import refuse_different_rows, to_compare_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Batch = Mapping[str, Any]
LABEL_KEYS = ("labels", "shift_labels")
WEIGHTS_KEY = "loss_weights"
LOSS_KEYS = (*LABEL_KEYS, WEIGHTS_KEY)  # what of a batch is for the loss and not for the forward

_OWN_LOSS = "for a loss of another kind give train_step and evaluate a loss_fn and a count_fn"


class TargetCount(int):
    """The targets of a window, which also knows its tokens.

    Attributes:
        num_tokens: Tokens of the window, without padding; 0 where they are not known.
        weight: Sum of the targets' ``loss_weights``; without any as many as there are targets.
    """

    num_tokens: int
    weight: float

    def __new__(cls, targets: int, num_tokens: int, weight: float | None = None) -> Self:
        """``targets``, with the others as attributes."""
        self = super().__new__(cls, targets)
        self.num_tokens = num_tokens
        self.weight = float(targets if weight is None else weight)
        return self

    def __getnewargs__(self) -> tuple[int, int, float]:  # type: ignore[override]
        """What pickle makes another one from."""
        return int(self), self.num_tokens, self.weight


@dataclass(frozen=True)
class Targets:
    """What the host knows of a batch's targets: a device would have to be waited for.

    Attributes:
        positions: int64 ``(N,)``, on the device: where they are in the flattened targets, ascending.
        lowest: The smallest id among them; 0 where there is none.
        highest: The largest.
    """

    positions: torch.Tensor
    lowest: int
    highest: int


class CheckedBatch(dict[str, Any]):
    """A batch on the device that was looked at on the host, with what was seen there.

    Attributes:
        targets: Its targets; None where nobody has looked yet.
    """

    def __init__(self, fields: Batch, targets: Targets | None) -> None:
        super().__init__(fields)
        self.targets = targets


def checked_batch(moved: Batch, seen: Batch, device: torch.device) -> CheckedBatch:
    """``moved``, which is on ``device``, with the targets of ``seen``, the same batch on the host."""
    return CheckedBatch(moved, seen_targets(seen, device))


def seen_targets(seen: Batch, device: torch.device) -> Targets:
    """The targets of a batch that is on the host, for ``device``."""
    flat = targets_of(seen).reshape(-1)
    positions = (flat != IGNORE_INDEX).nonzero().squeeze(1)
    low, high = map(int, flat[positions].aminmax()) if len(positions) else (0, 0)
    return Targets(travelling(positions, device), low, high)


def count_targets(
    micro_batches: Iterable[Batch],
    *,
    mesh: "DeviceMesh | None" = None,
    group: dist.ProcessGroup | None = None,
) -> TargetCount:
    """Number of targets in a window: all its micro-batches on all ranks, each row once.

    Args:
        micro_batches: Batches with ``labels``, int64 ``(B, S)``, aligned with ``input_ids``, or with
            ``shift_labels``, which hold the target of each position and need no shift.
        mesh: The ranks that share the window, from ``build_mesh``. Needed under context parallelism, where
            the ranks of a ``cp`` group have the same rows.
        group: In its place, ranks to sum over, with a backend that takes CPU tensors. Without either all
            ranks.

    Returns:
        How many labels, after the shift, are not -100. The number also has ``num_tokens``, by which
        ``causal_lm_loss`` weighs a router's loss, and ``weight``, by which it divides where batches bring
        ``loss_weights``.

    Raises:
        ValueError: If a batch has no proper labels; if mesh and group are given, or no mesh although this
            process has one with ``cp``.
        BatchError: If ranks of one ``cp`` group have different rows.

    Collective: all ranks of ``mesh`` or ``group``.
    """
    if mesh is not None and group is not None:
        raise ValueError("give mesh or group: a mesh says which ranks share the window")
    if mesh is None and has_context_parallelism():
        raise ValueError(
            "this process has a mesh with cp, whose ranks share rows: give count_targets(..., mesh=mesh), "
            "which counts each row once"
        )
    batches = list(micro_batches)
    own = [
        float(sum(num_targets(batch) for batch in batches)),
        float(sum(num_tokens(batch, needs_ids=False) for batch in batches)),
        sum((weight_of(batch) for batch in batches), 0.0),
    ]
    if mesh is not None:
        sharing = sequence_group_in(mesh)
        once = own if sharing is None or sharing.rank == 0 else [0.0] * len(own)
        same_rows = to_compare_rows(batches, sharing)
        targets, tokens, weight, *apart = sum_over_mesh([*once, *same_rows], mesh)
        refuse_different_rows(apart)
    elif group is None:
        targets, tokens, weight = all_reduce_sum(own)
    else:
        total = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(total, group=group)
        targets, tokens, weight = total.tolist()
    return TargetCount(int(targets), int(tokens), weight)


def target_weight(
    micro_batches: Iterable[Batch],
    *,
    mesh: "DeviceMesh | None" = None,
    group: dist.ProcessGroup | None = None,
) -> float:
    """What the targets of a window weigh together: the sum of their ``loss_weights``.

    Args:
        micro_batches: As for ``count_targets``.
        mesh: Likewise.
        group: Likewise.

    Returns:
        The sum on all ranks; a batch without ``loss_weights`` adds its number of targets.

    Raises:
        ValueError: If a batch has no proper labels or weights.

    Collective: all ranks of ``mesh`` or ``group``.
    """
    return count_targets(micro_batches, mesh=mesh, group=group).weight


def num_tokens(batch: Any, needs_ids: bool = True) -> int:
    """Tokens of a batch without padding: by its mask ``(B, S)``, or without what fills a pack up.

    Raises:
        BatchError: Without ``input_ids``, if it needs them; else those are 0 tokens.
    """
    fields = batch if isinstance(batch, Mapping) else {}
    mask, ids = fields.get("attention_mask"), fields.get("input_ids")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return int(mask.sum())
    if isinstance(ids, torch.Tensor):
        counted = counted_tokens(batch) if _has_labels(batch) else None
        return ids.numel() if counted is None else int(counted.sum())
    if needs_ids:
        seen = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise BatchError(f"a batch needs 'input_ids', got {seen}")
    return 0


def counted_tokens(batch: Batch) -> torch.Tensor | None:
    """Which tokens of a batch are none of padding, bool ``(B, S)``; None where all may be taken to be.

    Computed where the batch is, without waiting for it.
    """
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        return mask != 0 if mask.ndim == 2 else None
    filler = filler_of(batch, targets_of(batch))
    return None if filler is None else ~filler


def _has_labels(batch: Batch) -> bool:
    """Whether a batch has labels, or targets, of one value an id."""
    labels = batch.get("shift_labels" if is_shifted(batch) else "labels")
    ids = batch["input_ids"]
    return isinstance(labels, torch.Tensor) and labels.dtype == torch.int64 and labels.shape == ids.shape


def num_targets(batch: Batch) -> int:
    """Number of targets in one batch of this rank: labels after the shift that are not -100."""
    return int((targets_of(batch) != IGNORE_INDEX).sum())


def targets_of(batch: Batch) -> torch.Tensor:
    """The target of each position, int64 ``(B, S)``: ``shift_labels`` if it has them."""
    if is_shifted(batch):
        return _checked(batch, "shift_labels")
    return shifted(_checked(batch, "labels"))


def weights_of(batch: Batch) -> torch.Tensor | None:
    """The weight of each position's target, floating point ``(B, S)``, or None if a batch brings none.

    They are aligned with the labels, and shifted as these are.
    """
    weights = batch.get(WEIGHTS_KEY) if isinstance(batch, Mapping) else None
    if weights is None:
        return None
    name = "shift_labels" if is_shifted(batch) else "labels"
    labels = _checked(batch, name)
    if (
        not isinstance(weights, torch.Tensor)
        or not weights.is_floating_point()
        or weights.shape != labels.shape
    ):
        tensor = isinstance(weights, torch.Tensor)
        got = f"{weights.dtype} {tuple(weights.shape)}" if tensor else type(weights).__name__
        raise BatchError(
            f"{WEIGHTS_KEY} must be a floating point tensor of the shape of {name} {tuple(labels.shape)}, "
            f"got {got}"
        )
    return weights if is_shifted(batch) else F.pad(weights[:, 1:], (0, 1), value=0.0)


def weight_of(batch: Batch) -> float:
    """What the targets of one batch of this rank weigh together; the host waits if they are on a device.

    Raises:
        BatchError: If the weight of a target is negative or not finite.
    """
    weights = weights_of(batch)
    if weights is None:
        return float(num_targets(batch))
    counted = weights[targets_of(batch) != IGNORE_INDEX].to(torch.float64)
    if not bool(((counted >= 0) & counted.isfinite()).all()):
        wrong = counted[~((counted >= 0) & counted.isfinite())]
        raise BatchError(f"{WEIGHTS_KEY} must be finite and not negative, got {float(wrong[0])}")
    return float(counted.sum())


def is_shifted(batch: Batch) -> bool:
    """Whether a batch brings its targets shifted; its ``labels``, if there are any, are then not read."""
    return isinstance(batch, Mapping) and batch.get("shift_labels") is not None


def without_labels(batch: Batch) -> dict[str, Any]:
    """What of a batch is for the model's forward when the loss is computed outside of it."""
    return {name: value for name, value in batch.items() if name not in LOSS_KEYS}


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """The target of each position: the next label; the last position has none. ``(B, S)`` as ``labels``."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def scale_for_backward(
    loss: torch.Tensor, *, num_targets: float, mesh: "DeviceMesh | None" = None
) -> torch.Tensor:
    """Scale a sum so that after FSDP2's averaging the gradient is that of the mean over ``num_targets``.

    Args:
        loss: Sum over this rank's targets in one micro-batch.
        num_targets: Targets of the whole window over all ranks, from ``count_targets``; for a loss with
            ``loss_weights`` their sum, from ``target_weight``.
        mesh: Ranks that FSDP2 averages over; None takes all ranks of the job.

    Returns:
        ``loss * data-parallel size / num_targets``.

    Raises:
        ValueError: If ``num_targets`` is not positive.
    """
    check_num_targets(num_targets)
    ranks = mesh.size() if mesh is not None else world_size()
    # FSDP2 averages over the mesh; cancel it so that every token weighs the same.
    return loss * (ranks / num_targets)


def check_num_targets(num_targets: float) -> None:
    """Refuse a window without targets, which has no mean."""
    if not num_targets > 0:
        raise ValueError(
            f"num_targets must be above 0, got {num_targets}: a window without targets has no mean; "
            "skip it on all ranks (train_step does) and filter such rows with filter_rows"
        )


def _checked(batch: Batch, name: str) -> torch.Tensor:
    """The labels of a batch, int64 ``(B, S)``, or an error that says what is wrong with them."""
    labels = batch.get(name) if isinstance(batch, Mapping) else None
    if labels is None:
        seen = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise BatchError(f"a batch needs 'labels' aligned with 'input_ids', got {seen}; {_OWN_LOSS}")
    ids = batch.get("input_ids")
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2 or labels.dtype != torch.int64:
        tensor = isinstance(labels, torch.Tensor)
        got = f"{labels.dtype} {tuple(labels.shape)}" if tensor else type(labels).__name__
        raise BatchError(f"{name} must be an int64 tensor of shape (B, S), got {got}; {_OWN_LOSS}")
    if isinstance(ids, torch.Tensor) and ids.shape != labels.shape:
        raise BatchError(
            f"{name} {tuple(labels.shape)} must be aligned with input_ids {tuple(ids.shape)}; the loss "
            f"shifts labels itself; {_OWN_LOSS}"
        )
    return labels

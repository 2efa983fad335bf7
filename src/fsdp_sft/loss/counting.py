"""Targets: the labels that count, their number and weight, and the scale that makes each count the same."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fsdp_sft._process.streams import travelling
from fsdp_sft._ranks.agree import all_reduce_sum, world_size
from fsdp_sft._ranks.mesh import mesh_of_job, row_group
from fsdp_sft.errors import BatchError
from fsdp_sft.targets import IGNORE_INDEX, shifted

Batch = Mapping[str, Any]
LABEL_KEYS = ("labels", "shift_labels")
WEIGHTS_KEY = "loss_weights"
LOSS_KEYS = (*LABEL_KEYS, WEIGHTS_KEY)  # keys that the loss reads and the model's forward does not get

_OWN_LOSS = "for a loss of another kind give train_step and evaluate a loss_fn and a count_fn"


class TargetCount(int):
    """Number of targets of a window, with its number of tokens and the weight of its targets.

    Attributes:
        num_tokens: Number of tokens of the window, without padding; 0 if unknown.
        weight: Sum of the targets' ``loss_weights``; without weights the number of targets.
    """

    num_tokens: int
    weight: float

    def __new__(cls, targets: int, num_tokens: int = 0, weight: float | None = None) -> Self:
        """The integer ``targets`` with the other arguments as attributes."""
        self = super().__new__(cls, targets)
        self.num_tokens = num_tokens
        self.weight = float(targets if weight is None else weight)
        return self


@dataclass(frozen=True)
class Targets:
    """Facts about a batch's targets that the host knows, so that it need not wait for the device.

    Attributes:
        positions: Indices of the targets in the flattened labels, ascending; int64 ``(N,)``, on the device.
        lowest: Smallest target id; 0 if there is no target.
        highest: Largest target id; 0 if there is no target.
    """

    positions: torch.Tensor
    lowest: int
    highest: int


class CheckedBatch(dict[str, Any]):
    """A batch on the device, with what the host found out before moving it.

    Attributes:
        targets: Facts about its targets; None if not known.
        counted: Mask of its tokens that are neither padding nor filler; None if not known.
    """

    counted: torch.Tensor | None = None

    def __init__(self, fields: Batch, targets: Targets | None) -> None:
        super().__init__(fields)
        self.targets = targets


def facts_of(flat: torch.Tensor, device: torch.device) -> Targets:
    """Facts about flattened labels; the host waits for them if they are on a device."""
    positions = (flat != IGNORE_INDEX).nonzero().squeeze(1)
    low, high = torch.stack(flat[positions].aminmax()).tolist() if len(positions) else (0, 0)
    return Targets(travelling(positions, device), low, high)


def count_targets(micro_batches: Iterable[Batch], *, mesh: DeviceMesh | None = None) -> TargetCount:
    """Number of targets in a window: in all its micro-batches on all ranks, counting each row once.

    Args:
        micro_batches: Batches with ``labels``, int64 ``(B, S)``, aligned with ``input_ids``, or with
            ``shift_labels``, which hold the target of each position and need no shift.
        mesh: Mesh from ``build_mesh``, which says which ranks share rows; None takes the only one there is,
            or all ranks if there is none.

    Returns:
        Number of labels that are not -100 after the shift. It is an ``int`` with two attributes:
        ``num_tokens``, by which ``causal_lm_loss`` weights a router's loss, and ``weight``, by which it
        divides if batches have ``loss_weights``.

    Raises:
        ValueError: If a batch has no proper labels, or if ``mesh`` is left out although this process has made
            several with different ``cp``.

    Collective: all ranks of ``mesh``.

    Example:
        >>> ids, labels = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[-100, -100, 5, 6]])
        >>> count = fs.count_targets([{"input_ids": ids, "labels": labels}])
        >>> count, count.num_tokens
        (2, 4)
    """
    sharing = row_group(mesh_of_job(mesh))
    batches = list(micro_batches)
    own = [
        float(sum(num_targets(batch) for batch in batches)),
        float(sum(num_tokens(batch, needs_ids=False) for batch in batches)),
        sum((weight_of(batch) for batch in batches), 0.0),
    ]
    targets, tokens, weight = all_reduce_sum(own if sharing is None or sharing.rank() == 0 else [0.0] * 3)
    return TargetCount(int(targets), int(tokens), weight)


def num_tokens(batch: Any, needs_ids: bool = True) -> int:
    """Number of tokens of a batch, without padding (by its mask ``(B, S)``) or a pack's filler.

    Raises:
        BatchError: If it has neither a mask nor ``input_ids``, or these are empty, unless not ``needs_ids``.
    """
    ids, counted = batch.get("input_ids") if isinstance(batch, Mapping) else None, counted_tokens(batch)
    if needs_ids and (not ids.numel() if isinstance(ids, torch.Tensor) else counted is None):
        raise BatchError(f"a batch needs 'input_ids' of a token at least, got {_seen(batch)}")
    if counted is not None:
        return int(counted.sum())
    return ids.numel() if isinstance(ids, torch.Tensor) else 0


def counted_tokens(batch: Any) -> torch.Tensor | None:
    """Mask of the tokens that are not padding, bool ``(B, S)``; None if no token is known to be padding.

    It is computed on the batch's device, and the host does not wait for it.
    """
    if isinstance(batch, CheckedBatch) and batch.counted is not None:
        return batch.counted
    fields = batch if isinstance(batch, Mapping) else {}
    mask, ids = fields.get("attention_mask"), fields.get("input_ids")
    if isinstance(mask, torch.Tensor):
        return mask != 0 if mask.ndim == 2 else None
    labels: Any = fields.get("shift_labels" if is_shifted(batch) else "labels")
    is_usual = isinstance(labels, torch.Tensor) and labels.dtype == torch.int64
    if fields.get("position_ids") is None or not is_usual or labels.shape != getattr(ids, "shape", None):
        return None
    from fsdp_sft.collate.packs import filler_of

    filler = filler_of(batch, targets_of(batch))
    return None if filler is None else ~filler


def num_targets(batch: Batch) -> int:
    """Number of targets in one batch of this rank: labels that are not -100 after the shift."""
    return int((targets_of(batch) != IGNORE_INDEX).sum())


def targets_of(batch: Batch) -> torch.Tensor:
    """The target of each position, int64 ``(B, S)``: ``shift_labels``, or ``labels`` shifted here."""
    if is_shifted(batch):
        return _checked(batch, "shift_labels")
    return shifted(_checked(batch, "labels"))


def weights_of(batch: Batch) -> torch.Tensor | None:
    """The weight of each position's target, floating point ``(B, S)``; None if a batch has no weights.

    A batch's weights are aligned with its labels and shifted like them.
    """
    weights = batch.get(WEIGHTS_KEY) if isinstance(batch, Mapping) else None
    if weights is None:
        return None
    shape = targets_of(batch).shape
    if not isinstance(weights, torch.Tensor) or not weights.is_floating_point() or weights.shape != shape:
        raise BatchError(
            f"{WEIGHTS_KEY} must be a floating point tensor of the shape of the labels {tuple(shape)}, got "
            f"{_said(weights)}"
        )
    return weights if is_shifted(batch) else F.pad(weights[:, 1:], (0, 1), value=0.0)


def weight_of(batch: Batch) -> float:
    """Sum of the weights of the targets of one batch; the host waits if they are on a device.

    Raises:
        BatchError: If the weight of a target is negative or not finite.
    """
    weights = weights_of(batch)
    if weights is None:
        return float(num_targets(batch))
    counted = weights[targets_of(batch) != IGNORE_INDEX].to(torch.float64)
    wrong = counted[~((counted >= 0) & counted.isfinite())]
    if len(wrong):
        raise BatchError(f"{WEIGHTS_KEY} must be finite and not negative, got {float(wrong[0])}")
    return float(counted.sum())


def is_shifted(batch: Batch) -> bool:
    """Whether a batch has ``shift_labels``; any ``labels`` are then ignored."""
    return isinstance(batch, Mapping) and batch.get("shift_labels") is not None


def scale_for_backward(
    loss: torch.Tensor, *, num_targets: float, mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """Scale a sum so that after FSDP2's averaging the gradient is that of the mean over ``num_targets``.

    Args:
        loss: Sum over this rank's targets in one micro-batch.
        num_targets: Number of targets of the whole window over all ranks, from ``count_targets``; for a loss
            with ``loss_weights`` their sum, its ``weight``.
        mesh: Mesh over which FSDP2 averages the gradients; None takes the only one there is.

    Returns:
        ``loss * ranks / num_targets``, with the number of ranks in the job.

    Raises:
        ValueError: If ``num_targets`` is not positive, or ``mesh`` is left out although this process has made
            several with different ``cp``.

    Example:
        >>> num_targets = fs.count_targets(window)
        >>> for batch in window:
        ...     summed, _ = fs.loss_sum(model, batch)
        ...     fs.scale_for_backward(summed, num_targets=num_targets).backward()
    """
    check_num_targets(num_targets)
    mesh_of_job(mesh)
    return scaled_for_averaging(loss, num_targets)


def scaled_for_averaging(loss: torch.Tensor, num_targets: float) -> torch.Tensor:
    """``scale_for_backward`` without its checks."""
    # FSDP2 divides the sum of the ranks' gradients by the number of ranks. That is the mean only if all ranks
    # hold equally many targets. Rank r's loss is a sum S_r, and the gradient wanted is that of
    # (S_0 + S_1 + ...) / num_targets, in which every target counts the same. So each S_r is divided by
    # num_targets and multiplied by the number of ranks, which cancels FSDP2's division.
    return loss * (world_size() / num_targets)


def check_num_targets(num_targets: float) -> None:
    """Refuse a window without targets, which has no mean."""
    if not num_targets > 0:
        raise ValueError(
            f"num_targets must be above 0, got {num_targets}: a window without targets has no mean; "
            "skip it on all ranks (train_step does) and filter such rows with filter_rows"
        )


def _checked(batch: Batch, name: str) -> torch.Tensor:
    """Labels of a batch, int64 ``(B, S)``; raises an error that says what is wrong with them."""
    labels: Any = batch.get(name) if isinstance(batch, Mapping) else None
    if labels is None:
        raise BatchError(
            f"a batch needs 'labels' aligned with 'input_ids', got {_seen(batch)}; a window is a list of "
            f"batches, [batch] of one; {_OWN_LOSS}"
        )
    ids = batch.get("input_ids")
    is_usual = isinstance(labels, torch.Tensor) and not labels.is_nested and labels.dtype == torch.int64
    beside = ids if isinstance(ids, torch.Tensor) and not ids.is_nested else labels
    if not is_usual or labels.ndim != 2 or labels.shape != beside.shape:
        raise BatchError(
            f"{name} of {_said(labels)} must be aligned with input_ids of {_said(ids)}, as int64 (B, S); "
            "the loss shifts labels itself. Nested rows are to be padded "
            f"(torch.nested.to_padded_tensor) or packed (PackedCollator); {_OWN_LOSS}"
        )
    return labels  # type: ignore[no-any-return]


def _said(value: Any) -> str:
    """What a value of a batch is, in words."""
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return "a nested tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    return f"{value.dtype} {tuple(value.shape)}"


def _seen(batch: Any) -> str:
    """The keys of a batch, or its type, in words."""
    return str(sorted(map(str, batch))) if isinstance(batch, Mapping) else type(batch).__name__

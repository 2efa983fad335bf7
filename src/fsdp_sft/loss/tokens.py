"""The loss of each token of a batch, and the entropy of its prediction, with or without logits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_sft._compat.models import original_class
from fsdp_sft._model.inputs import no_cache
from fsdp_sft._model.sharded import reshard
from fsdp_sft.attention.context_parallel import part_of_rows, sequence_group_of
from fsdp_sft.collate import refuse_masked_pack
from fsdp_sft.errors import ModelLossError
from fsdp_sft.experts import counter_of
from fsdp_sft.loss.counting import (
    Batch,
    CheckedBatch,
    counted_tokens,
    is_shifted,
    targets_of,
    without_labels,
)
from fsdp_sft.loss.head import loss_at_head
from fsdp_sft.loss.linear_token_losses import linear_token_losses
from fsdp_sft.loss.part import BatchPart, own_part, whole_rows
from fsdp_sft.loss.prepare import LossImpl, check_impl, choice_for, refuse_encoder_decoder
from fsdp_sft.loss.transform import wide
from fsdp_sft.targets import IGNORE_INDEX


@overload
def token_losses(
    model: nn.Module, batch: Batch, *, impl: LossImpl = "auto", entropy: Literal[False] = False
) -> torch.Tensor: ...


@overload
def token_losses(
    model: nn.Module, batch: Batch, *, impl: LossImpl = "auto", entropy: Literal[True]
) -> tuple[torch.Tensor, torch.Tensor]: ...


def token_losses(
    model: nn.Module, batch: Batch, *, impl: LossImpl = "auto", entropy: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood of each label, for a loss of your own (DPO, weights, clipped ratios).

    ``-token_losses(model, batch)`` are the log-probabilities of the labels. Each may get any weight, of
    either sign; the loss made of them is differentiated as if it were made of logits, which are not held.

    Args:
        model: Decoder-only language model, sharded or not. Under ``torch.no_grad`` (a reference model) the
            result costs a forward.
        batch: Batch of the form that ``loss_sum`` takes, padded or packed. ``loss_weights`` are left to you.
        impl: Implementation; see ``loss_sum``.
        entropy: Whether to return the entropy of each prediction as well, from the same pass.

    Returns:
        Losses, float32 ``(B, S)`` (float64 for float64 logits), aligned with the labels: entry ``[b, s]`` is
        that of ``labels[b, s]``, which position ``s - 1`` predicts, and 0 where that is -100 or ``s`` is 0.
        With ``shift_labels``, entry ``[b, s]`` is that of ``shift_labels[b, s]``. With ``entropy``, (losses,
        entropies in nats), alike in shape and alignment. All are connected to the parameters even if the
        batch has no target. A router's loss is not part of them.

        Under context parallelism each rank of a group gives the whole rows and gets the values of all their
        tokens. The backward sums what the group's ranks have made of them, so a loss that each of them
        computes counts ``cp`` times: ``train_step`` and ``evaluate`` count a ``loss_fn`` once; in a loop of
        your own divide by ``cp``.

    Raises:
        ModelLossError: If the forward does something else to its head's output than when its loss was
            prepared.
        ValueError: If the model is an encoder-decoder or a classifier, if the batch has no proper labels, or
            if the losses cannot be computed by ``impl``.
        RuntimeError: In a backward that is to be derived itself (``create_graph=True``).

    Collective: all ranks of the model's mesh, by its forward.
    Memory: ``chunk_size * V`` logits, as in ``linear_cross_entropy_sum``. Until the backward, the hidden
        states; if the head is frozen, their gradient in float32. A trained head's gradient needs the logits a
        second time, which the backward computes in chunks. With trained tokens on the head, a copy of
        its weight until the backward.

    Example:
        >>> losses = fs.token_losses(model, batch)
        >>> losses.dtype, losses.shape == batch["labels"].shape
        (torch.float32, True)
        >>> summed, _ = fs.loss_sum(model, batch)
        >>> torch.allclose(losses.sum(), summed)
        True
    """
    check_impl(impl)
    part, group = part_for(model, batch)
    values = _values(model, part, impl, entropy)
    if group is not None:
        values = whole_rows(values, group)[..., : batch["input_ids"].shape[1]]
    if not is_shifted(batch):
        values = F.pad(values[..., :-1], (1, 0))
    return (values[0], values[1]) if entropy else values[0]


def part_for(model: nn.Module, batch: Batch) -> tuple[Batch, Any]:
    """(this rank's part of a checked batch, the ranks that share its rows or None)."""
    refuse_encoder_decoder(model)
    if torch.compiler.is_compiling():
        refuse_masked_pack(batch)
        return batch, None
    reshard(model)
    group = sequence_group_of(model)
    part = own_part(batch, group)
    if not isinstance(part, CheckedBatch):
        refuse_masked_pack(batch)
    return part, group


@contextmanager
def forward_of(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Context of a forward of a batch or of this rank's part of one."""
    counter = None if torch.compiler.is_compiling() else counter_of(model)
    mask = batch.counted if isinstance(batch, BatchPart) else None
    if counter is not None and not isinstance(batch, BatchPart):
        mask = counted_tokens(batch)
    rows = part_of_rows(batch.whole) if isinstance(batch, BatchPart) else nullcontext()
    with rows, nullcontext() if counter is None else counter.counting(mask):
        yield


def _values(model: nn.Module, batch: Batch, impl: LossImpl, entropy: bool) -> torch.Tensor:
    """Losses of the positions' targets, ``(1, B, S)``, or with their entropies, ``(2, B, S)``."""
    if impl == "logits":
        return _from_logits(model, batch, entropy)
    planned: Callable[..., torch.Tensor] = _as_planned
    if torch.compiler.is_compiling():  # forwards of modules are replaced for a while
        planned = torch.compiler.disable(planned)
    return planned(model, batch, impl, entropy)


def _as_planned(model: nn.Module, batch: Batch, impl: LossImpl, entropy: bool) -> torch.Tensor:
    """The values by the implementation chosen for the model."""
    choice = choice_for(model, impl)
    head = choice.head() if choice.head is not None else None
    if head is None:
        return _from_logits(model, batch, entropy)
    known = batch.targets if isinstance(batch, CheckedBatch) else None
    compute = partial(linear_token_losses, labels=targets_of(batch), known=known, entropy=entropy)
    with forward_of(model, batch):
        inputs = {**without_labels(batch), **no_cache(model)}
        return loss_at_head(model, head, inputs, choice.at(head, compute), choice.transform)[0]


def logits_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Full logits of a batch with labels, ``(B, S, V)``, float32 or float64.

    Raises:
        ModelLossError: If the model returns logits of another shape.
    """
    with forward_of(model, batch):
        logits = model(**without_labels(batch), **no_cache(model)).logits
    targets = targets_of(batch)
    if logits.ndim != 3 or logits.shape[:2] != targets.shape:
        raise ModelLossError(
            f"a loss of tokens needs logits of shape (B, S, vocabulary) for labels {tuple(targets.shape)}, "
            f"got {tuple(logits.shape)} from {original_class(model).__name__}"
        )
    return wide(logits)


def _from_logits(model: nn.Module, batch: Batch, entropy: bool) -> torch.Tensor:
    """The values from full logits."""
    logits = logits_of(model, batch)
    targets = targets_of(batch).to(logits.device)
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    losses = losses.view(targets.shape)
    if not entropy:
        return losses[None]
    logs = logits.log_softmax(-1)
    entropies = torch.where(targets == IGNORE_INDEX, 0.0, -(logs.exp() * logs).sum(-1))
    return torch.stack([losses, entropies])

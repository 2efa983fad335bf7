"""The causal-LM loss of a model on a batch: labels shifted once, a float32 sum, with or without logits."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_sft._compat.compile import outside_of_graphs
from fsdp_sft._model.forward import forward_parameters, no_cache
from fsdp_sft._model.sharded import refuse_changed_gradients, training_mesh_of
from fsdp_sft._model.view import reshard
from fsdp_sft.collate.packs import refuse_masked_pack
from fsdp_sft.errors import ModelLossError
from fsdp_sft.experts import counter_of
from fsdp_sft.loss.counting import (
    LOSS_KEYS,
    WEIGHTS_KEY,
    Batch,
    CheckedBatch,
    check_num_targets,
    counted_tokens,
    is_shifted,
    num_targets,
    num_tokens,
    scaled_for_averaging,
    targets_of,
    weight_of,
    weights_of,
)
from fsdp_sft.loss.head import loss_at_head
from fsdp_sft.loss.linear import head_losses
from fsdp_sft.loss.part import OF_WHOLE_ROWS, BatchPart, Rows, rows_of
from fsdp_sft.loss.plain import PLAIN, Terms, plain_losses
from fsdp_sft.loss.prepare import (
    ROUTER_FLAG,
    additions_to,
    choice_for,
    name_of,
    refuse_encoder_decoder,
    router_loss_of,
)
from fsdp_sft.sampling.verify import verify_at_first_use


@outside_of_graphs
def loss_sum(
    model: nn.Module,
    batch: Batch,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, int]:
    """Cross entropy summed over this batch's targets.

    Before a model's first loss, its own loss on a tiny batch is compared with the cross entropy, so that no
    term that the model adds is lost silently. ``prepare_loss`` says whether logits are held, and whether a
    mixture's router adds its loss: times its coefficient and the number of targets, so that the result
    divided by that number is the model's own loss.

    Args:
        model: Decoder-only language model, sharded or not, that returns ``logits``.
        batch: ``input_ids`` and ``labels``, int64 ``(B, S)``, on the model's device. Everything else
            (``attention_mask``, ``position_ids``, ...) is passed to the model's forward. Labels are shifted
            here, once. ``shift_labels``, which hold the target of each position, replace ``labels`` if
            present. ``loss_weights``, floating point ``(B, S)`` and aligned with the labels, are factors of
            the targets' losses.
        label_smoothing: Label smoothing, defined as in ``torch.nn.functional.cross_entropy``.
        z_loss: Factor of the z-loss, the squared logarithm of the softmax's denominator, which is added to
            each target's loss (PaLM: 1e-4).

    Returns:
        (the loss, the number of targets). The loss is a float32 scalar (float64 for float64 logits),
        connected to the parameters even if the batch has no target. Under context parallelism both are those
        of this rank's part of the rows, and their sums over the group's ranks are those of the batch; within
        the ``loss_fn`` of ``train_step`` each rank of a group gets those of the whole rows.

    Raises:
        ModelLossError: If the model's own loss is not the cross entropy; the message has both numbers. Also
            if a router's loss is to be added of rows that ranks share.
        ValueError: If the model is an encoder-decoder or a classifier, or if the batch has no proper labels.

    Collective: all ranks of the model's mesh, by its forward.
    Memory: Beside the model's own memory, that of ``linear_cross_entropy_sum``. A head that does not allow
    it, or ``prepare_loss(impl="logits")``, takes two float32 copies of the logits, 8 bytes times B x S x
    vocabulary.

    Example:
        >>> loss, num_targets = fs.loss_sum(model, batch)
        >>> mean = loss / num_targets
        >>> loss.dtype, loss.shape
        (torch.float32, torch.Size([]))
    """
    part, rows = _part_for(model, batch)
    summed, router, *_ = loss_parts(model, part, Terms(label_smoothing, z_loss))
    if router is not None:
        summed = summed + router * weight_of(part)
    if OF_WHOLE_ROWS.get():
        return rows.whole(summed.reshape(1), rows.ranks).sum(), num_targets(batch)
    return summed, num_targets(part)


@outside_of_graphs
def causal_lm_loss(model: nn.Module, batch: Batch, *, num_targets: int) -> torch.Tensor:
    """This micro-batch's share of the window's mean loss, ready for ``backward``.

    Args:
        model: Decoder-only language model, sharded or not.
        batch: Batch of the form that ``loss_sum`` takes.
        num_targets: Number of targets of the whole window over all ranks, from ``count_targets``, which
            keeps the number of tokens and the sum of the ``loss_weights`` with it. The loss of a mixture's
            router is weighted by the micro-batch's share of those tokens.

    Returns:
        A scalar. Summed over the window's micro-batches and averaged over ranks it is the mean over targets,
        weighted by ``loss_weights`` if there are any.

    Raises:
        ValueError: If ``loss_sum`` refuses the model or the batch, or ``num_targets`` is not positive.
        PackingError: If the model mixes the rows of its first pack, or a pack has an attention mask.
        UnsupportedModelError: If a trained parameter has hooks that do not run, or FSDP2 divides gradients by
            another number than that of the ranks.

    Collective: all ranks, by the model's forward, with batches of the same keys.

    Example:
        >>> num_targets = fs.count_targets(window)
        >>> for batch in window:
        ...     fs.causal_lm_loss(model, batch, num_targets=num_targets).backward()
        >>> optimizer.step()
    """
    mesh = training_mesh_of(model)
    if batch.get("position_ids") is not None and rows_of(model).ranks == 1:
        verify_at_first_use(model, batch, mesh)  # attention of shared rows is the library's own
    weight = getattr(num_targets, "weight", None)
    if weight is None and batch.get(WEIGHTS_KEY) is not None:
        raise ValueError(
            "a batch with loss_weights is divided by the sum of the window's weights, which is not known: "
            "take num_targets from count_targets, which sums them too"
        )
    weight = num_targets if weight is None else weight
    check_num_targets(weight)
    part, _ = _part_for(model, batch)
    if mesh is not None:
        refuse_changed_gradients(model, mesh)  # of the shards, which the forward replaces
    summed, router, *_ = loss_parts(model, part)
    if router is not None:
        tokens = getattr(num_targets, "num_tokens", 0)
        if not tokens:
            raise ValueError(
                "the router's loss of a micro-batch weighs by its tokens over those of the window, which are "
                "not known: take num_targets from count_targets, which counts them too, or leave that loss "
                "out by prepare_loss(model, router_loss='off')"
            )
        summed = summed + router * (num_tokens(part) / tokens * weight)
    return summed / weight if mesh is None else scaled_for_averaging(summed, weight)


@outside_of_graphs
def token_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Negative log-likelihood of each label, for a loss of your own (DPO, weights, clipped ratios).

    ``-token_losses(model, batch)`` are the log-probabilities of the labels. Each may get any weight, of
    either sign; the loss made of them is differentiated as if it were made of logits, which are not held.

    Args:
        model: Decoder-only language model, sharded or not. Under ``torch.no_grad`` (a reference model) the
            result costs a forward.
        batch: Batch of the form that ``loss_sum`` takes, padded or packed. ``loss_weights`` are left to you.

    Returns:
        Losses, float32 ``(B, S)`` (float64 for float64 logits), aligned with the labels: entry ``[b, s]`` is
        that of ``labels[b, s]``, which position ``s - 1`` predicts, and 0 where that is -100 or ``s`` is 0.
        With ``shift_labels``, entry ``[b, s]`` is that of ``shift_labels[b, s]``. They are connected to the
        parameters even if the batch has no target. A router's loss is not part of them.

        Under context parallelism each rank of a group gives the whole rows and gets the values of all their
        tokens. The backward sums what the group's ranks have made of them, so a loss that each of them
        computes counts ``cp`` times: ``train_step`` and ``evaluate`` count a ``loss_fn`` once; in a loop of
        your own divide by ``cp``.

    Raises:
        ValueError: If the model is an encoder-decoder or a classifier, or if the batch has no proper labels.
        RuntimeError: In a backward that is to be derived itself (``create_graph=True``).

    Collective: all ranks of the model's mesh, by its forward.
    Memory: ``chunk_size * V`` logits, as in ``linear_cross_entropy_sum``. Until the backward, the hidden
        states; if the head is frozen, their gradient in float32. A trained head's gradient needs the logits a
        second time, which the backward computes in chunks.

    Example:
        >>> losses = fs.token_losses(model, batch)
        >>> losses.dtype, losses.shape == batch["labels"].shape
        (torch.float32, True)
        >>> summed, _ = fs.loss_sum(model, batch)
        >>> torch.allclose(losses.sum(), summed)
        True
    """
    refuse_encoder_decoder(model)
    part, rows = _part_for(model, batch)
    inputs = {}
    if ROUTER_FLAG in forward_parameters(model):
        inputs[ROUTER_FLAG] = False  # the router's loss is no part of these
    values = _computed(model, part, inputs, summed=False).summed
    values = rows.whole(values, targets_of(batch).shape[1])
    return values if is_shifted(batch) else F.pad(values[..., :-1], (1, 0))


class LossParts(NamedTuple):
    """What a forward gives of a batch.

    Attributes:
        summed: The loss summed over the targets, a scalar.
        router: The router's loss times its coefficient, which the caller weights by tokens; None for none.
        correct: Number of targets whose logit is the largest, int64, 0-dim.
        metrics: What a caller's loss returned beside the loss, float64.
    """

    summed: torch.Tensor
    router: torch.Tensor | None
    correct: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = MappingProxyType({})


def loss_parts(model: nn.Module, batch: Batch, terms: Terms = PLAIN) -> LossParts:
    """The loss of a batch, by one forward.

    Args:
        model: Decoder-only language model, sharded or not.
        batch: Batch of the form that ``loss_sum`` takes; under context parallelism this rank's part of one.
        terms: What the loss has beside the cross entropy.
    """
    refuse_encoder_decoder(model)
    has_router, inputs = additions_to(model)
    if has_router and isinstance(batch, BatchPart):
        raise ModelLossError(
            f"the router's loss of {name_of(model)} cannot be added under context parallelism, where a rank "
            "routes a part of each row: leave it out by prepare_loss(model, router_loss='off')"
        )
    added = partial(router_loss_of, model, has_router)
    return _computed(model, batch, inputs, added, weights=weights_of(batch), terms=terms)


def _computed(
    model: nn.Module,
    batch: Batch,
    inputs: dict[str, Any],
    added: Callable[[Any], torch.Tensor | None] = lambda output: None,
    **what: Any,
) -> LossParts:
    """One forward: ``plain_losses`` of ``what``, at the head or of logits, and what is ``added``."""
    what["labels"] = targets_of(batch)
    if batch.get("position_ids") is not None and not isinstance(batch, CheckedBatch):
        refuse_masked_pack(batch)
    given = {name: value for name, value in batch.items() if name not in LOSS_KEYS}
    inputs = {**given, **no_cache(model), **inputs}
    choice, counter = choice_for(model), counter_of(model)
    head = choice.head
    counting = nullcontext() if counter is None else counter.counting(counted_tokens(batch))
    sharing = batch.in_forward() if isinstance(batch, BatchPart) else nullcontext()
    with counting, sharing:
        if head is not None:
            known = batch.targets if isinstance(batch, CheckedBatch) else None
            compute = partial(head_losses, known=known, **what)
            forward = loss_at_head(model, choice, head, inputs, compute, added)
            return LossParts(forward.loss, forward.added, forward.correct)
        output = model(**inputs)
    loss, correct = plain_losses(output.logits, **what)
    return LossParts(loss, added(output), correct)


def _part_for(model: nn.Module, batch: Batch) -> tuple[Batch, Rows]:
    """(what this rank computes of a batch, how ranks have its rows); the model is resharded."""
    reshard(model)  # a forward before an optimizer's step leaves the root gathered, with the old values
    rows = rows_of(model)
    return rows.part(batch), rows

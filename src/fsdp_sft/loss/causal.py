"""The causal-LM loss of a model on a batch: labels shifted once, a float32 sum, with or without logits."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sft._model.sharded import training_mesh_of
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.former import told_of_former
from fsdp_sft._process.streams import travelling
from fsdp_sft._ranks.agree import world_size
from fsdp_sft._ranks.mesh import CP, device_groups_of
from fsdp_sft.attention.context_parallel import (
    SequenceGroup,
    WholeRows,
    compare_again,
    part_of_rows,
    sequence_group_of,
)
from fsdp_sft.collate import refuse_masked_pack
from fsdp_sft.errors import ModelLossError
from fsdp_sft.experts import counter_of
from fsdp_sft.loss import counting
from fsdp_sft.loss.additions import Additions, RouterLoss, additions_to, check_router_loss
from fsdp_sft.loss.balance import Balance, balanced_by
from fsdp_sft.loss.counting import (
    WEIGHTS_KEY,
    Batch,
    CheckedBatch,
    Targets,
    check_num_targets,
    counted_tokens,
    is_shifted,
    num_targets,
    scaled_for_averaging,
    targets_of,
    weight_of,
    weights_of,
    without_labels,
)
from fsdp_sft.loss.head import loss_at_head, takes_use_cache
from fsdp_sft.loss.part import BatchPart, part_of, tokens_of
from fsdp_sft.loss.prepare import LossImpl, check_impl, choice_for, look_again, refuse_encoder_decoder
from fsdp_sft.loss.terms import PLAIN, Terms, summed_loss
from fsdp_sft.shard.expert_parallel import refuse_divided_twice

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def loss_sum(
    model: nn.Module,
    batch: Batch,
    *,
    impl: LossImpl = "auto",
    router_loss: RouterLoss | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, int]:
    """Cross entropy summed over this batch's targets.

    Before a model's first loss, its own loss on a tiny batch is compared with the cross entropy, so that no
    term that the model adds is lost silently.

    Args:
        model: Decoder-only language model, sharded or not, that returns ``logits``.
        batch: ``input_ids`` and ``labels``, int64 ``(B, S)``, on the model's device. Everything else
            (``attention_mask``, ``position_ids``, ...) is passed to the model's forward. Labels are shifted
            here, once. ``shift_labels``, which hold the target of each position, replace ``labels`` if
            present. ``loss_weights``, floating point ``(B, S)`` and aligned with the labels, are factors of
            the targets' losses.
        impl: Implementation of the loss. ``"chunked"`` holds the logits of one chunk of targets at a time;
            ``"liger"`` does so with Liger's kernels (CUDA); ``"logits"`` computes them in full. ``"auto"`` is
            what ``prepare_loss`` has chosen, or chooses now: chunked if the model's head allows it.
        router_loss: What to do with the loss of a mixture's router. ``"micro_batch"`` adds it, as the model
            computes it for this batch, times its coefficient and the number of targets; the result divided
            by that number is then the model's own loss. Filler of a pack does not count, and under context
            parallelism the whole rows count. ``"global_micro_batch"`` computes it over the tokens of all
            ranks of the model's mesh in this call; each rank's result has its share. ``"off"`` leaves it
            out. None is ``"micro_batch"`` if the config has ``output_router_logits``; if not, the loss is
            left out with one warning that names the coefficient.
        label_smoothing: Label smoothing, defined as in ``torch.nn.functional.cross_entropy``.
        z_loss: Factor of the z-loss, the squared logarithm of the softmax's denominator, which is added to
            each target's loss (PaLM: 1e-4).

    Returns:
        (the loss, the number of targets). The loss is a float32 scalar (float64 for float64 logits),
        connected to the parameters even if the batch has no target. Under context parallelism both are those
        of this rank's part of the rows, and their sums over the group's ranks are those of the batch.

    Raises:
        ModelLossError: If the model's own loss is not the cross entropy; the message says what it does. Also
            if several ranks hold the model and its forward has changed since its loss was checked: call
            ``prepare_loss`` on all of them after such a change. Also if the router's loss has to be computed
            over several ranks or without a pack's filler, and is not transformers' usual one.
        ValueError: If the model is an encoder-decoder or a classifier, if the batch has no proper labels, or
            if the model's loss cannot be computed by ``impl``.

    Collective: all ranks of the model's mesh, by its forward.
    Memory: Beside the model's own memory, that of ``linear_cross_entropy_sum``. ``"logits"`` holds two
    float32 copies of the logits, 8 bytes times B x S x vocabulary.

    Example:
        >>> loss, num_targets = fs.loss_sum(model, batch)
        >>> mean = loss / num_targets
        >>> loss.dtype, loss.shape
        (torch.float32, torch.Size([]))
    """
    group = None if torch.compiler.is_compiling() else _looked_at_again(model, impl)
    batch = batch if group is None else part_of(batch, group)
    summed, router = loss_parts(
        model, batch, impl, router_loss, Terms(label_smoothing=label_smoothing, z_loss=z_loss)
    )
    targets = num_targets(batch)
    if router is not None:
        groups = () if torch.compiler.is_compiling() else ranks_of_router(model, batch, router_loss)
        summed = summed + router * _weight_of_router(batch, groups, router.device)
    return summed, targets


def _looked_at_again(model: nn.Module, impl: LossImpl) -> SequenceGroup | None:
    """The ranks that share the model's rows; findings about a forward that has changed are forgotten."""
    check_impl(impl)
    look_again(model, impl)
    group = sequence_group_of(model)
    compare_again(model, group)
    return group


@told_of_former
def causal_lm_loss(
    model: nn.Module,
    batch: Batch,
    *,
    num_targets: int,
    impl: LossImpl = "auto",
    router_loss: RouterLoss | None = None,
    num_tokens: int | None = None,
    target_weight: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """This micro-batch's share of the window's mean loss, ready for ``backward``.

    Args:
        model: Decoder-only language model, sharded or not.
        batch: Batch of the form that ``loss_sum`` takes.
        num_targets: Number of targets of the whole window over all ranks, from ``count_targets``.
        impl: Implementation of the loss; see ``loss_sum``.
        router_loss: What to do with the loss of a mixture's router; see ``loss_sum``. Here it is weighted by
            the micro-batch's share of the window's tokens, without padding.
        num_tokens: Number of tokens of the window over all ranks, without padding; None takes the number
            that ``count_targets`` has stored in ``num_targets``.
        target_weight: Sum of the window's ``loss_weights`` over all ranks, if its batches have any; None
            takes the sum that ``count_targets`` has stored in ``num_targets``.
        label_smoothing: Label smoothing; see ``loss_sum``.
        z_loss: Factor of the z-loss; see ``loss_sum``.

    Returns:
        A scalar. Summed over the window's micro-batches and averaged over ranks it is the mean over targets,
        weighted by ``loss_weights`` if there are any.

    Raises:
        ValueError: If ``loss_sum`` refuses the model or the batch, or ``num_targets`` is not positive or was
            counted for a mesh with another ``cp`` than the model's.

    Collective: all ranks, by the model's forward.

    Example:
        >>> num_targets = fs.count_targets(window)
        >>> for batch in window:
        ...     fs.causal_lm_loss(model, batch, num_targets=num_targets).backward()
        >>> optimizer.step()
    """
    mesh = training_mesh_of(model)
    if not torch.compiler.is_compiling():
        refuse_divided_twice(model)
    check_num_targets(num_targets)
    weight = _weight_of_window(batch, num_targets, target_weight)
    if target_weight is None:
        _warn_of_few_targets(batch, num_targets, mesh)
    group = None if torch.compiler.is_compiling() else _looked_at_again(model, impl)
    _refuse_other_sharing(num_targets, group)
    batch = batch if group is None else part_of(batch, group)
    summed, router = loss_parts(
        model, batch, impl, router_loss, Terms(label_smoothing=label_smoothing, z_loss=z_loss)
    )
    if router is not None:
        share = _share_of_tokens(batch, num_targets, num_tokens, mesh)
        summed = summed + router * (share * weight)
    return summed / weight if mesh is None else scaled_for_averaging(summed, weight)


def _refuse_other_sharing(num_targets: int, group: SequenceGroup | None) -> None:
    """Refuse targets that were counted for another ``cp`` than the model's."""
    counted, own = getattr(num_targets, "cp", None), 1 if group is None else group.size
    if counted not in (None, own):
        raise ValueError(
            f"num_targets was counted for a mesh with cp={counted}, and each row of this model is computed "
            f"by {own} ranks: give count_targets, windows and samplers the model's mesh, by mesh="
        )


def _warn_of_few_targets(batch: Batch, num_targets: int, mesh: "DeviceMesh | None") -> None:
    """Warn if a batch has more targets than its window is said to have over all ranks.

    Without a mesh the ranks are the caller's, who may count on an average over them. Labels on a device are
    not counted, since the host would have to wait for them.
    """
    labels = batch.get("shift_labels" if counting.is_shifted(batch) else "labels")
    if torch.compiler.is_compiling() or not isinstance(labels, torch.Tensor) or not labels.is_cpu:
        return
    own = counting.num_targets(batch) if mesh is not None or world_size() == 1 else 0
    if own > num_targets:
        warn_caller(
            f"num_targets={num_targets}, and this batch alone has {own}: the loss and its gradient are too "
            "large. Pass the targets of the whole window over all ranks, count_targets(window)"
        )


def _weight_of_window(batch: Batch, num_targets: int, target_weight: float | None) -> float:
    """Divisor of the window's loss: the sum of its weights, or its number of targets."""
    known = target_weight if target_weight is not None else getattr(num_targets, "weight", None)
    if known is None and batch.get(WEIGHTS_KEY) is not None:
        raise ValueError(
            "a batch with loss_weights is divided by the sum of the window's weights, which is not known: "
            "take num_targets from count_targets, which sums them too, or pass target_weight"
        )
    weight = num_targets if known is None else known
    check_num_targets(weight)
    return weight


def _share_of_tokens(
    batch: Batch, num_targets: int, num_tokens: int | None, mesh: "DeviceMesh | None"
) -> float:
    """A batch's share of the window's tokens."""
    tokens = num_tokens if num_tokens is not None else getattr(num_targets, "num_tokens", 0)
    if tokens:
        return tokens_of(batch) / tokens
    if num_targets == counting.num_targets(batch) and (mesh is None or mesh.size() == 1):
        return 1.0  # the batch is the window
    raise ValueError(
        "the router's loss of a micro-batch weighs by its tokens over those of the window, which are not "
        "known: take num_targets from count_targets, which counts them too, or pass num_tokens or "
        "router_loss='off'"
    )


def _weight_of_router(
    batch: Batch, groups: tuple[dist.ProcessGroup, ...], device: torch.device
) -> torch.Tensor | float:
    """Factor that brings this rank's router loss, a mean, into the unit of the summed loss.

    It is the weight of the batch's targets. Over several ranks it is their total weight, times this rank's
    share of their tokens.
    """
    weight = weight_of(batch)
    if not groups:
        return weight
    own = float(tokens_of(batch))
    total = torch.tensor([weight, own], dtype=torch.float64)
    total = travelling(total, device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return total[0] * own / total[1].clamp(min=1)


def ranks_of_router(
    model: nn.Module, batch: Batch, router_loss: RouterLoss | None
) -> tuple[dist.ProcessGroup, ...]:
    """Process groups over whose tokens a batch's router loss is computed; none if only over this rank's.

    They take tensors on the device. Sums go over one group after the other.
    """
    if router_loss != "global_micro_batch" and not isinstance(batch, BatchPart):
        return ()
    mesh = training_mesh_of(model)
    if router_loss == "global_micro_batch":
        return device_groups_of(mesh)
    return () if mesh is None else (mesh.get_group(CP),)


def _balance(
    model: nn.Module,
    batch: Batch,
    additions: Additions,
    groups: tuple[dist.ProcessGroup, ...],
    router_loss: RouterLoss | None,
) -> Balance | None:
    """Replacement of the model's own router loss; None takes the model's own.

    Raises:
        ModelLossError: If only the model's own can be taken, and it is not the loss that is asked for.
    """
    if additions.router is None:
        return None
    counted = batch.counted if isinstance(batch, BatchPart) else counted_tokens(batch)
    if additions.is_balanced:
        return Balance(counted, groups)
    name = type(model).__name__
    if router_loss == "global_micro_batch" or isinstance(batch, BatchPart):
        whose = "all ranks" if router_loss == "global_micro_batch" else "the whole rows, which ranks share"
        raise ModelLossError(
            f"the router's loss of {name} is not computed by transformers' usual function in an uncompiled "
            f"forward, so that it cannot be that of {whose}; take router_loss='off'"
        )
    if counted is not None and batch.get("attention_mask") is None and not bool(counted.all()):
        raise ModelLossError(
            f"the router's loss of {name} is not computed by transformers' usual function in an uncompiled "
            "forward, and would count what fills this pack up; leave padding= and pad_to_multiple_of= of "
            "PackedCollator out, or take router_loss='off'"
        )
    return None


def loss_parts(
    model: nn.Module,
    batch: Batch,
    impl: LossImpl,
    router_loss: RouterLoss | None,
    terms: Terms = PLAIN,
    is_counted: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the loss summed over the targets, the router's loss times its coefficient or None).

    The router's loss is this rank's share, which the caller weights by tokens.

    Args:
        model: Decoder-only language model, sharded or not.
        batch: Batch of the form that ``loss_sum`` takes, or this rank's part of one.
        impl: Implementation of the loss; see ``loss_sum``.
        router_loss: What to do with the loss of a mixture's router; see ``loss_sum``.
        terms: What the loss has beside the cross entropy.
        is_counted: False for a batch that only takes part in other ranks' forwards: the router's loss then
            does not count its tokens.
    """
    check_router_loss(router_loss)
    check_impl(impl)
    refuse_encoder_decoder(model)
    if not isinstance(batch, BatchPart) and not torch.compiler.is_compiling():
        group = sequence_group_of(model)
        batch = batch if group is None else part_of(batch, group)
    targets, weights = targets_of(batch), weights_of(batch)
    known = batch.targets if isinstance(batch, CheckedBatch) else None
    if known is None:
        refuse_masked_pack(batch)
    inputs = without_labels(batch)
    if takes_use_cache(model):
        # Training needs no cache, and with one transformers does not separate the rows of a pack.
        inputs["use_cache"] = False
    find, planned = additions_to, _as_planned
    if torch.compiler.is_compiling():
        # Both replace the forwards of modules for a while, which a compiled graph cannot contain.
        find, planned = torch.compiler.disable(find), torch.compiler.disable(planned)
    additions = find(model, router_loss)
    inputs.update(additions.inputs)
    whole = batch.whole if isinstance(batch, BatchPart) else None
    balance = None
    if not torch.compiler.is_compiling():
        groups = ranks_of_router(model, batch, router_loss)
        balance = _balance(model, batch, additions, groups, router_loss)
        if balance is not None and not is_counted:
            balance.counted = torch.zeros_like(targets, dtype=torch.bool)
    elif router_loss == "global_micro_batch":
        raise ModelLossError("router_loss='global_micro_batch' cannot be computed inside of torch.compile")
    counting: AbstractContextManager[None] = nullcontext()
    counter = None if torch.compiler.is_compiling() else counter_of(model)
    if counter is not None:
        counting = counter.counting(batch.counted if isinstance(batch, BatchPart) else counted_tokens(batch))
    wanted = _Wanted(targets, weights, terms, additions, is_shifted(batch), known, whole, balance, counting)
    if impl == "logits":
        return _from_logits(model, inputs, wanted)
    return planned(model, inputs, wanted, impl)


@dataclass(frozen=True)
class _Wanted:
    """Definition of the loss of one forward.

    Attributes:
        targets: Target of each position, ``(B, S)``.
        weights: Factors of the targets' losses, ``(B, S)``, or None.
        terms: What the loss has beside the cross entropy.
        additions: Terms that the model itself adds to its loss.
        whole: Whether the last position may have a target too, as with ``shift_labels``.
        known: Facts about the targets that the host knows already.
        rows: Facts about the whole rows of which this rank has a part; None if it has whole rows.
        balance: Computation of the router's loss; None leaves it to the model.
        counting: Context manager in which the tokens of each expert are counted.
    """

    targets: torch.Tensor
    weights: torch.Tensor | None
    terms: Terms
    additions: Additions
    whole: bool
    known: Targets | None
    rows: WholeRows | None = None
    balance: Balance | None = None
    counting: AbstractContextManager[None] = field(default_factory=nullcontext)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context in which the model's forward runs."""
        rows = nullcontext() if self.rows is None else part_of_rows(self.rows)
        with rows, balanced_by(self.balance), self.counting:
            yield

    def added(self, output: Any, model: nn.Module) -> torch.Tensor | None:
        """The router's loss in a forward's output, if it is added."""
        if self.balance is not None and self.balance.loss is None:
            raise ModelLossError(
                f"the router's loss of {type(model).__name__} was not computed where it was when the model "
                "was first asked: it has been compiled as a whole since (compile_blocks compiles its "
                "blocks), or its forward replaced"
            )
        return self.additions.of(output, model)


def _as_planned(
    model: nn.Module, inputs: dict[str, Any], wanted: _Wanted, impl: LossImpl
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss by the implementation chosen for the model."""
    choice = choice_for(model, impl)
    head = choice.head() if choice.head is not None else None
    if choice.impl == "logits" or head is None:
        return _from_logits(model, inputs, wanted)
    loss_of = choice.loss_of(head, wanted.targets, wanted.known, wanted.weights, wanted.terms)
    with wanted.forward():
        return loss_at_head(
            model, head, inputs, loss_of, choice.transform, lambda out: wanted.added(out, model)
        )


def _from_logits(
    model: nn.Module, inputs: dict[str, Any], wanted: _Wanted
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss from full logits."""
    targets, weights = wanted.targets, wanted.weights
    with wanted.forward():
        output = model(**inputs)
    logits = output.logits
    if logits.ndim != 3 or logits.shape[:2] != targets.shape:
        raise ModelLossError(
            f"causal_lm_loss needs logits of shape (B, S, vocabulary) for labels {tuple(targets.shape)}, got "
            f"{tuple(logits.shape)} from {type(model).__name__}; for a classifier give train_step a loss_fn"
        )
    added = wanted.added(output, model)
    if not wanted.whole:
        logits, targets = logits[:, :-1], targets[:, :-1]
        weights = None if weights is None else weights[:, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets = targets.flatten().to(logits.device)
    weights = None if weights is None else weights.flatten().to(logits.device)
    return summed_loss(logits.flatten(0, 1), targets, weights, wanted.terms), added

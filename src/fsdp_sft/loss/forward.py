"""The loss of one forward as its parts: the sum over the targets, and the loss of a mixture's router."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sft._model.inputs import no_cache
from fsdp_sft._model.sharded import training_mesh_of
from fsdp_sft._ranks.mesh import CP, device_groups_of
from fsdp_sft.attention.context_parallel import WholeRows, part_of_rows
from fsdp_sft.collate import refuse_masked_pack
from fsdp_sft.errors import ModelLossError
from fsdp_sft.experts import counter_of
from fsdp_sft.loss.additions import Additions, RouterLoss, additions_to, check_router_loss
from fsdp_sft.loss.balance import Balance, balanced_by
from fsdp_sft.loss.counting import (
    Batch,
    CheckedBatch,
    Targets,
    counted_tokens,
    targets_of,
    weights_of,
    without_labels,
)
from fsdp_sft.loss.head import loss_at_head
from fsdp_sft.loss.part import BatchPart
from fsdp_sft.loss.prepare import LossImpl, check_impl, choice_for, refuse_encoder_decoder
from fsdp_sft.loss.terms import Terms, summed_loss
from fsdp_sft.loss.transform import wide


def loss_parts(
    model: nn.Module,
    batch: Batch,
    impl: LossImpl,
    router_loss: RouterLoss | None,
    terms: Terms,
    is_counted: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the loss summed over the targets, the router's loss times its coefficient or None).

    The router's loss is this rank's share, which the caller weights by tokens.

    Args:
        model: Decoder-only language model, sharded or not.
        batch: Batch of the form that ``loss_sum`` takes; under context parallelism this rank's part of one.
        impl: Implementation of the loss; see ``loss_sum``.
        router_loss: What to do with the loss of a mixture's router; see ``loss_sum``.
        terms: What the loss has beside the cross entropy.
        is_counted: False for a batch that only takes part in other ranks' forwards: the router's loss then
            does not count its tokens.
    """
    check_router_loss(router_loss)
    check_impl(impl)
    refuse_encoder_decoder(model)
    targets, weights = targets_of(batch), weights_of(batch)
    known = batch.targets if isinstance(batch, CheckedBatch) else None
    if known is None:
        refuse_masked_pack(batch)
    whole = batch.whole if isinstance(batch, BatchPart) else None
    find, planned = additions_to, _as_planned
    balance = counter = None
    if torch.compiler.is_compiling():
        if router_loss == "global_micro_batch":
            raise ModelLossError(
                "router_loss='global_micro_batch' cannot be computed inside of torch.compile"
            )
        # Both replace the forwards of modules for a while, which a compiled graph cannot contain.
        find, planned = torch.compiler.disable(find), torch.compiler.disable(planned)
        additions = find(model, router_loss)
    else:
        additions = find(model, router_loss)
        balance, counter = _balance(model, batch, additions, router_loss), counter_of(model)
        if balance is not None and not is_counted:
            balance.counted = torch.zeros_like(targets, dtype=torch.bool)
    counting = nullcontext() if counter is None else counter.counting(_counted(batch))
    wanted = _Wanted(targets, weights, terms, additions, known, whole, balance, counting)
    inputs = {**without_labels(batch), **no_cache(model), **additions.inputs}
    if impl == "logits":
        return _from_logits(model, inputs, wanted)
    return planned(model, inputs, wanted, impl)


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
    router_loss: RouterLoss | None,
) -> Balance | None:
    """Replacement of the model's own router loss; None takes the model's own.

    Raises:
        ModelLossError: If only the model's own can be taken, and it is not the loss that is asked for.
    """
    if additions.router is None:
        return None
    counted = _counted(batch)
    if additions.is_balanced:
        return Balance(counted, ranks_of_router(model, batch, router_loss))
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


def _counted(batch: Batch) -> torch.Tensor | None:
    """Mask of the tokens of a batch that are neither padding nor filler; None if all count."""
    return batch.counted if isinstance(batch, BatchPart) else counted_tokens(batch)


@dataclass(frozen=True)
class _Wanted:
    """Definition of the loss of one forward.

    Attributes:
        targets: Target of each position, ``(B, S)``.
        weights: Factors of the targets' losses, ``(B, S)``, or None.
        terms: What the loss has beside the cross entropy.
        additions: Terms that the model itself adds to its loss.
        known: Facts about the targets that the host knows already.
        rows: Facts about the whole rows of which this rank has a part; None if it has whole rows.
        balance: Computation of the router's loss; None leaves it to the model.
        counting: Context manager in which the tokens of each expert are counted.
    """

    targets: torch.Tensor
    weights: torch.Tensor | None
    terms: Terms
    additions: Additions
    known: Targets | None
    rows: WholeRows | None
    balance: Balance | None
    counting: AbstractContextManager[None]

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
    if head is None:
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
    with wanted.forward():
        output = model(**inputs)
    logits, targets, weights = output.logits, wanted.targets, wanted.weights
    if logits.ndim != 3 or logits.shape[:2] != targets.shape:
        raise ModelLossError(
            f"causal_lm_loss needs logits of shape (B, S, vocabulary) for labels {tuple(targets.shape)}, got "
            f"{tuple(logits.shape)} from {type(model).__name__}; for a classifier give train_step a loss_fn"
        )
    added = wanted.added(output, model)
    targets = targets.flatten().to(logits.device)
    weights = None if weights is None else weights.flatten().to(logits.device)
    return summed_loss(wide(logits).flatten(0, 1), targets, weights, wanted.terms), added

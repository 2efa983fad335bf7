"""Iteration in step over batches of which ranks have unequal numbers."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fsdp_sft._ranks.agree import all_gather_objects, control_group
from fsdp_sft._ranks.mesh import raise_on_mesh, same_rows_in, sum_over_mesh
from fsdp_sft.attention.context_parallel import SequenceGroup
from fsdp_sft.loss import refuse_different_rows, to_compare_rows
from fsdp_sft.step.keys import Keys, are_equal, digest, keys_of, refuse_different_keys, to_compare
from fsdp_sft.step.own_loss import Objective
from fsdp_sft.step.window import Check, begun_late, on_host

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def in_step(
    batches: Iterable[Any],
    mesh: "DeviceMesh | None",
    objective: Objective,
    check: Check,
    group: SequenceGroup | None,
) -> Iterator[tuple[Any, Any, tuple[float, float] | None]]:
    """Yield this rank's batches and then stand-ins, until every rank has run out.

    A stand-in is a batch with the keys of those that other ranks have in that round: the last batch of this
    rank, or if its keys are others, one that another rank sends. Each round costs one small all-reduce.

    Args:
        batches: This rank's batches.
        mesh: Mesh of the model, whose ranks go through their batches together; None is this rank alone.
        objective: Definition of the loss, which says what a target is.
        check: Function that raises for a batch that the model cannot take.
        group: Ranks that share rows; each computes its part of them.

    Yields:
        (the batch as the loader gave it; the same on the host, or this rank's part of it; this rank's share
        of its targets and of their weight, None for a stand-in).

    Raises:
        BatchError: On all ranks, if those that have a batch have different keys, or ranks of a group have
            different rows.

    Collective: all ranks, if there is a mesh.
    """
    ranks = mesh.size() if mesh is not None else 1
    last: Any = None
    seen: Any = None
    keys: Keys = ()
    source = begun_late(batches)
    while True:
        batch = error = count = None
        same_rows = [0.0, 0.0]
        try:
            batch = next(source, None)
            if batch is not None:
                (seen,) = on_host([batch])
                same_rows = to_compare_rows([seen], group or same_rows_in(mesh))
                check(seen)
                keys = keys_of(batch)
                seen = objective.part(seen, group)
                targets, weight, _ = objective.measured(batch, seen, group)
                count = targets, weight
        except Exception as caught:
            error = caught
        terms = to_compare(digest(keys))
        silent = [0.0] * len(terms)
        mine, stood = (terms, silent) if batch is not None else (silent, terms)
        have, failed, *sums = sum_over_mesh(
            [batch is not None, error is not None, *mine, *stood, *same_rows], mesh
        )
        if failed:
            raise_on_mesh(error, "reading a batch to evaluate", mesh)
        if not have:
            return
        refuse_different_rows(sums[-2:])
        if not are_equal(sums[: len(terms)], int(have)):
            refuse_different_keys([keys] if batch is not None else [])
        last = last if batch is None else batch
        # The sums tell every rank whether all that have run out have a stand-in with the right keys. If not,
        # one batch is sent to all.
        everyone = [one + other for one, other in zip(sums[: len(terms)], sums[len(terms) : -2], strict=True)]
        if not are_equal(everyone, ranks):
            sent = _from_a_rank_with_one(batch)
            if batch is None:
                last, keys = sent, keys_of(sent)
                seen = objective.part(on_host([sent])[0], group)
        yield last, seen, count


def _from_a_rank_with_one(batch: Any) -> Any:
    """The batch of some rank that has one, on all ranks; pickled, since it may be of any type.

    Collective: all ranks, at least one of which has a batch.
    """
    has = all_gather_objects(batch is not None)
    told = [batch]
    dist.broadcast_object_list(told, src=has.index(True), group=control_group())
    return batch if batch is not None else told[0]

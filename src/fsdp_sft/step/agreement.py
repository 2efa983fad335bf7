"""What ranks agree on before a forward: sums of named numbers, and what has to be the same on all of them.

The keys of a batch are compared, because a forward runs the modules that its arguments need. If one rank's
batch has an image and another's has none, the first gathers the parameters of the vision tower and the second
never does, so the job hangs, or gloo aborts it.
"""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdp_sft._ranks.agree import all_gather_objects, difference
from fsdp_sft._ranks.mesh import sum_over_mesh
from fsdp_sft._ranks.words import said_ranks
from fsdp_sft.errors import BatchError
from fsdp_sft.loss import LABEL_KEYS, WEIGHTS_KEY

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Keys = tuple[str, ...]
# Squares of 20-bit words summed over 8,192 ranks stay below 2**53, up to which float64 is exact.
_WORD_BITS = 20
_WORDS = 3


def agree(
    mesh: "DeviceMesh | None", sums: dict[str, float], same: dict[str, Any]
) -> tuple[dict[str, float], set[str]]:
    """Sum numbers over the ranks and compare values between them, in one small all-reduce.

    Args:
        mesh: Mesh of the model; None is this rank alone.
        sums: Numbers of this rank by name.
        same: Values of this rank by name, compared by their ``repr``; None for one that it does not have.

    Returns:
        (the sums over all ranks, names of the values in which ranks that have one differ).

    Collective: all ranks, if there is a mesh, with the same names.
    """
    own = list(sums.values())
    for value in same.values():
        words = [0] * _WORDS if value is None else _digest(value)
        own += [value is not None, *words, *(word * word for word in words)]
    totals = sum_over_mesh(own, mesh)
    different = set()
    for index, name in enumerate(same):
        start = len(sums) + index * (1 + 2 * _WORDS)
        have, *words = map(int, totals[start : start + 1 + 2 * _WORDS])
        # The variance of equal numbers is 0.
        if any(have * squares != total**2 for total, squares in zip(words, words[_WORDS:], strict=False)):
            different.add(name)
    return dict(zip(sums, totals, strict=False)), different


def _digest(value: Any) -> list[int]:
    """Three numbers below 2**20, equal for equal values and (nearly always) different for others."""
    bits = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big")
    return [bits >> shift & ((1 << _WORD_BITS) - 1) for shift in range(0, _WORDS * _WORD_BITS, _WORD_BITS)]


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
    size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    return (f"a {type(batch).__name__}{size}",)


def refuse_different_options(own: dict[str, Any]) -> None:
    """Raise the error that names the options in which the ranks' calls differ.

    Collective: all ranks; all must know that their options differ.
    """
    apart = difference(list(enumerate(all_gather_objects(own))))
    raise BatchError(f"ranks call with different options ({apart}); give all of them the same")


def refuse_different_keys(own: list[Keys]) -> None:
    """Raise the error that names the keys of each rank.

    Args:
        own: Keys of each of this rank's micro-batches; empty if it has none to compare.

    Collective: all ranks; all must know that their keys differ.
    """
    by_rank = [(rank, kinds) for rank, kinds in enumerate(all_gather_objects(own)) if kinds]
    columns = zip(*(kinds for _, kinds in by_rank), strict=False)
    index = next((i for i, column in enumerate(columns) if len(set(column)) > 1), 0)
    ranks_with: dict[Keys, list[int]] = {}
    for rank, kinds in by_rank:
        ranks_with.setdefault(kinds[index], []).append(rank)
    parts = [f"{said_ranks(ranks)}: {', '.join(keys)}" for keys, ranks in ranks_with.items()]
    shared = set.intersection(*(set(keys) for keys in ranks_with))
    apart = sorted({key for keys in ranks_with for key in keys} - shared)
    raise BatchError(
        f"ranks have different keys in micro-batch {index} ({'; '.join(parts)}). A forward that is given "
        f"{', '.join(apart)} may run other modules than one that is not, and ranks then wait for each other: "
        "give every rank the same keys, for instance a blank image to a row without one, or let a sampler "
        "hand rows of one kind to all ranks at a time"
    )

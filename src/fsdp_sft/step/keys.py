"""The keys of a batch, and the check that they are the same on all ranks.

A forward runs the modules that its arguments need. If one rank's batch has an image and another's has none,
the first gathers the parameters of the vision tower and the second never does, so the job hangs, or gloo
aborts it.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from fsdp_sft._ranks.agree import all_gather_objects, difference
from fsdp_sft._ranks.words import said_ranks
from fsdp_sft.errors import BatchError
from fsdp_sft.loss import LABEL_KEYS, WEIGHTS_KEY

Keys = tuple[str, ...]
# Squares of 20-bit words summed over 8,192 ranks stay below 2**53, up to which float64 is exact.
_WORD_BITS = 20


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


def digest(keys: Any) -> list[int]:
    """Three numbers below 2**20, equal for equal ``keys`` and (nearly always) different for others."""
    words = int.from_bytes(hashlib.blake2b(repr(keys).encode(), digest_size=8).digest(), "big")
    return [words >> shift & ((1 << _WORD_BITS) - 1) for shift in (0, _WORD_BITS, 2 * _WORD_BITS)]


def to_compare(numbers: list[int]) -> list[float]:
    """Each number and its square, whose sums over the ranks ``are_equal`` takes."""
    return [float(term) for number in numbers for term in (number, number * number)]


def are_equal(sums: list[float], ranks: int) -> bool:
    """Whether all ranks had the same numbers, given the sums of ``to_compare``: their variance is then 0."""
    whole = [int(value) for value in sums]
    return all(ranks * squares == total**2 for total, squares in zip(whole[::2], whole[1::2], strict=True))


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

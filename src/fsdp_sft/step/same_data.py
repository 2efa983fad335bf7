"""A word where each rank shuffles the whole data set for itself."""

import hashlib
import warnings
from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from fsdp_sft._agree import all_gather_objects, is_distributed, this_rank


def warn_of_shared_rows(loader: Any) -> None:
    """Warn on rank 0 if several ranks draw from the same rows in orders of their own.

    ``DataLoader(shuffle=True)`` knows of no other ranks: an epoch then has each row once for each rank, or
    not at all where the orders overlap. A data set of which each rank has another part is rightly shuffled.

    Args:
        loader: This rank's loader; None if it reads none.

    Collective: all ranks.
    """
    if not is_distributed():
        return
    told = [each for each in all_gather_objects(_drawn_alone(loader)) if each is not None]
    if this_rank() == 0 and len(told) > len(set(told)):
        warnings.warn(
            f"{len(told)} ranks shuffle the same rows, each for itself (DataLoader(shuffle=True)): an epoch "
            f"has every row {len(told)} times or so. Share them with "
            "DataLoader(sampler=ResumableSampler(rows)), or give each rank another part of the data. Ranks "
            "along tp, which have to have the same rows, get them by num_replicas= and rank=",
            stacklevel=4,
        )


def _drawn_alone(loader: Any) -> str | None:
    """A digest, by length and ends, of the data that a loader draws from at random; None if it does not."""
    if not isinstance(loader, DataLoader) or type(loader.sampler) is not RandomSampler:
        return None
    data: Any = loader.dataset
    try:
        ends = repr((len(data), data[0], data[len(data) - 1]))
    except Exception:  # the caller's data may be of any kind; the loader itself says what is wrong with it
        return None
    return hashlib.sha256(ends.encode()).hexdigest()

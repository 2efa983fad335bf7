"""Data sets and loaders."""

from typing import Any

import torch

# The documented base class of modes that see every operation; only the name of its module is private.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def is_hub_dataset(rows: Any) -> bool:
    """Whether ``rows`` is a ``datasets.Dataset``, told by its attributes: datasets may not be installed."""
    return hasattr(rows, "_fingerprint") and hasattr(rows, "column_names") and hasattr(rows, "__len__")


def dataset_fingerprint(rows: Any) -> str | None:
    """The fingerprint of a ``datasets.Dataset``; None for other rows.

    ``datasets`` computes it from the data set's files and all that was done to it, and keeps it in
    ``_fingerprint`` alone.
    """
    return str(rows._fingerprint) if is_hub_dataset(rows) else None


def shares_of_stream(rows: Any) -> int:
    """Number of shares into which a stream of ``datasets`` was split, if ``rows`` is one share; otherwise 1.

    ``datasets.distributed.split_dataset_by_node`` marks a share by the private ``_distributed`` alone.
    """
    return int(getattr(getattr(rows, "_distributed", None), "world_size", None) or 1)


def end_persistent_workers(loader: "torch.utils.data.DataLoader[Any]") -> None:
    """End the workers that a loader has kept; the next ones get its data set as it is now.

    Persistent workers have a copy of the data set from when they began, in which a later ``set_epoch`` does
    not show. A loader keeps them with its iterator, in the private ``_iterator``.
    """
    if loader.persistent_workers:
        loader._iterator = None

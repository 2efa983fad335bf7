"""Data sets and loaders."""

from typing import Any

import torch


def is_hub_dataset(rows: Any) -> bool:
    """Whether ``rows`` is a ``datasets.Dataset``, by its ``_fingerprint``: datasets may not be installed."""
    return hasattr(rows, "_fingerprint") and hasattr(rows, "column_names") and hasattr(rows, "__len__")


def dataset_fingerprint(rows: Any) -> str | None:
    """The fingerprint of a ``datasets.Dataset``; None for other rows.

    ``datasets`` computes it from the data set's files and all that was done to it, and keeps it in
    ``_fingerprint`` alone.
    """
    return str(rows._fingerprint) if is_hub_dataset(rows) else None


def shares_of_stream(rows: Any) -> int:
    """Number of shares that a stream of ``datasets`` was split into, if ``rows`` is one of them; else 1.

    ``datasets.distributed.split_dataset_by_node`` marks a share by the private ``_distributed`` alone.
    """
    return int(getattr(getattr(rows, "_distributed", None), "world_size", None) or 1)


def end_persistent_workers(loader: "torch.utils.data.DataLoader[Any]") -> None:
    """End the workers that a loader has kept; the next ones get its data set as it is now.

    Persistent workers copied the data set when they started, and do not see a later ``set_epoch``. A loader
    keeps them with its iterator, in the private ``_iterator``.
    """
    if loader.persistent_workers:
        loader._iterator = None

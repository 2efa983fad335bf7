"""What can go wrong with a checkpoint, by what to do about it."""

from collections.abc import Iterable


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class CheckpointCorruptError(CheckpointError):
    """Files are damaged, cut short, missing or not of the expected format: use another copy."""


class CheckpointMismatchError(CheckpointError):
    """The files are sound, but of another model or optimizer than the one to load into."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A sound checkpoint of that step is there already; it is never overwritten."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that place."""


def abridged(items: Iterable[str], separator: str = "; ", most: int = 8) -> str:
    """The first few items for a message, and how many more there are."""
    listed = list(items)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return separator.join(listed[:most]) + more

"""What can go wrong with a checkpoint, by what to do about it."""


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

"""What can be wrong with a checkpoint on its way into a model."""


class CheckpointFormatError(ValueError):
    """A Hugging Face checkpoint is damaged, unsafe, or does not fit the model."""


class MissingKeysError(CheckpointFormatError):
    """The model has parameters or buffers that the checkpoint has no values for."""


class UnexpectedKeysError(CheckpointFormatError):
    """The checkpoint has tensors that the model has no place for."""


class NonFiniteWeightsError(CheckpointFormatError):
    """A parameter's values in the checkpoint include NaN or infinity."""


def abridged(names: list[str] | set[str], most: int = 8) -> str:
    """Names for a message, the first few of them in order."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:most])
    return shown if len(ordered) <= most else f"{shown} and {len(ordered) - most} more"

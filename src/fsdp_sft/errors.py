"""Every error type of this library.

Each is also a subclass of the built-in exception that callers would expect, so ``except ValueError`` and
``except OSError`` work; ``except FsdpSftError`` catches all of them. Arguments of a wrong type or out of
range raise plain ``TypeError`` and ``ValueError``.

    FsdpSftError
      CheckpointError (RuntimeError)      reading or writing files of a model failed
        CheckpointCorruptError              damaged: use another copy
        CheckpointMismatchError             intact, but of another model or optimizer
        CheckpointExistsError (FileExistsError)  a checkpoint of that step exists
        CheckpointInUseError                another job saves below the same root
        CheckpointNotFoundError (FileNotFoundError)  no checkpoint at that place
        UnstorableStateError (TypeError, ValueError)  state that a checkpoint could not restore
        CheckpointFormatError (ValueError)  a Hugging Face checkpoint that cannot be loaded
          MissingKeysError                  parameters without values in the checkpoint
          UnexpectedKeysError               tensors in the checkpoint for which the model has no place
          NonFiniteWeightsError             NaN or infinity in a parameter
        UnfilledTensorsError                part of a model would be left without a value
      AdapterError (ValueError)           adapters that cannot be added, merged, or kept when a base is loaded
      ExportExistsError (FileExistsError) something exists where an export is to go
      VocabularyError (ValueError, IndexError)  ids without a row, or rows that cannot be added
      SafetensorsError (ValueError)       not the safetensors format
      ChatTemplateError (ValueError)      the trained part of a chat cannot be determined
        DroppedTextError                  the template does not print a text of an answer
      MediaError (ValueError)             a row with an image, a video or a sound, where text is encoded
      TooLongError (ValueError)           a row over max_length that may not be truncated
      UnsupportedModelError (ValueError)  a model with which this function cannot work
      PackingError (ValueError)           packed rows would see each other
      BatchError (ValueError)             batches that cannot be trained on, or not by these ranks together
      ModelLossError (ValueError)         a model's own loss is not the loss that is computed here
      NotFusedError (ValueError)          the loss needs the logits
      WrappedModelError (TypeError)       a wrapper around the model that hides its ranks or gradients
      OptimizerError (TypeError, ValueError)  optimizers or schedulers with which no step can be taken
      NonFiniteGradientError (FloatingPointError)  NaN or infinity in the gradient norm
      NoBlocksError (ValueError)          no transformer blocks found
      NotRecomputedError (RuntimeError)   a block chosen for checkpointing runs outside of its checkpoint
      HostMemoryError (MemoryError)       the host has no room for what would be offloaded to it
      NoPlanError (ValueError)            no plan fits into the memory
      LostRankError (RuntimeError)        another rank has died or does not answer
      CallMismatchError (RuntimeError)    ranks are in different calls
      RemoteRankError (RuntimeError)      another rank failed with an error that cannot be sent
"""

from collections.abc import Iterable


class FsdpSftError(Exception):
    """The base of every error type of this library.

    Example:
        >>> try:
        ...     fs.encode_chat(rows[0], tokenizer, max_length=4, truncation="error")
        ... except fs.FsdpSftError as error:
        ...     print(type(error).__name__)
        TooLongError
    """


class CheckpointError(FsdpSftError, RuntimeError):
    """Files of a model could not be written or read."""


class CheckpointCorruptError(CheckpointError):
    """Files are damaged, truncated, missing or not of the expected format: use another copy."""


class CheckpointMismatchError(CheckpointError):
    """The files are intact, but belong to another model or optimizer than the one to load into."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """An intact checkpoint of that step exists already; it is never overwritten."""


class CheckpointInUseError(CheckpointError):
    """Another job saves below the same root: give each job a folder of its own."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that place."""


class UnstorableStateError(CheckpointError, TypeError, ValueError):
    """A model or an optimizer has state that a checkpoint cannot hold, or could not restore."""


class CheckpointFormatError(CheckpointError, ValueError):
    """A Hugging Face checkpoint is damaged, unsafe, or does not fit the model."""


class MissingKeysError(CheckpointFormatError):
    """The model has parameters or buffers for which the checkpoint has no values."""


class UnexpectedKeysError(CheckpointFormatError):
    """The checkpoint has tensors for which the model has no place."""


class NonFiniteWeightsError(CheckpointFormatError):
    """A parameter's values in the checkpoint include NaN or infinity."""


class UnfilledTensorsError(CheckpointError):
    """Nothing defines the values of some parameters or buffers, which would keep what was in memory."""


class AdapterError(FsdpSftError, ValueError):
    """Adapters cannot be added to a model, merged or told apart from it, or would not fit a new base."""


class ExportExistsError(FsdpSftError, FileExistsError):
    """An export cannot be written, because something exists at its place."""


class VocabularyError(FsdpSftError, ValueError, IndexError):
    """A batch has ids for which the model has no row, or a vocabulary cannot be given more rows."""


class SafetensorsError(FsdpSftError, ValueError):
    """A file is not a valid safetensors file, or a tensor cannot be stored in one."""


class ChatTemplateError(FsdpSftError, ValueError):
    """The trained part of a conversation cannot be determined with certainty with this chat template."""


class MediaError(FsdpSftError, ValueError):
    """A row has an image, a video or a sound, where text alone is encoded; the message names its keys."""


class TooLongError(FsdpSftError, ValueError):
    """A row has more than ``max_length`` tokens and may not be truncated."""


class DroppedTextError(ChatTemplateError):
    """The chat template does not print a text of an answer that is to be trained."""


class UnsupportedModelError(FsdpSftError, ValueError):
    """The model lacks something that a function needs; the message says what, and what to do instead."""


class PackingError(FsdpSftError, ValueError):
    """The model does not keep packed rows apart, or it cannot be determined whether it does."""


class BatchError(FsdpSftError, ValueError):
    """Batches lack what a step needs, or differ in kind between ranks; nothing has been computed."""


class ModelLossError(FsdpSftError, ValueError):
    """A model's own loss is not the cross entropy, or a ``loss_fn`` is no sum; the message says which."""


class NotFusedError(FsdpSftError, ValueError):
    """The loss of a model cannot be computed without its logits; the message says why."""


class WrappedModelError(FsdpSftError, TypeError):
    """The model is in a wrapper that hides its ranks or gradients; the message names the wrapper."""


class OptimizerError(FsdpSftError, TypeError, ValueError):
    """A step cannot be taken with these optimizers or schedulers; nothing has been computed."""


class NonFiniteGradientError(FsdpSftError, FloatingPointError):
    """The gradient norm is NaN or infinite; parameters and optimizer are as they were before the step."""


class NoBlocksError(FsdpSftError, ValueError):
    """No module of the model matches as a transformer block."""


class NotRecomputedError(FsdpSftError, RuntimeError):
    """A block that ``apply_sac`` has chosen does not run through its checkpoint in the model's forward."""


class HostMemoryError(FsdpSftError, MemoryError):
    """The host has too little memory for activations that are to be offloaded; it has not been allocated."""


class NoPlanError(FsdpSftError, ValueError):
    """No plan fits into the memory; the message says what would."""


class LostRankError(FsdpSftError, RuntimeError):
    """Another rank has died, or has not answered within the time-out: end the job and start it again."""


class CallMismatchError(FsdpSftError, RuntimeError):
    """Ranks are in different calls, as where one of them alone saves; the message says in which."""


class RemoteRankError(FsdpSftError, RuntimeError):
    """Another rank failed with an error of a class that is not sent, so the message has its text."""


def abridged(items: Iterable[str], separator: str = ", ", most: int = 8) -> str:
    """The first few items, for a message, and the number of the others; a set is sorted."""
    listed = sorted(items) if isinstance(items, (set, frozenset)) else list(items)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return separator.join(listed[:most]) + more

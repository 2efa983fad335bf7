"""Every error type of this library.

Each is also the built-in that callers would expect, so ``except ValueError`` and ``except OSError`` go on
working; ``except FsdpSftError`` takes them all. Arguments of a wrong type or out of range are plain
``TypeError`` and ``ValueError``.

    FsdpSftError
      CheckpointError (RuntimeError)      reading or writing files of a model failed
        CheckpointCorruptError              damaged: use another copy
        CheckpointMismatchError             sound, but of another model or optimizer
        CheckpointExistsError (FileExistsError)
        CheckpointNotFoundError (FileNotFoundError)
        UnstorableStateError (TypeError, ValueError)  state that no checkpoint could give back
        CheckpointFormatError (ValueError)  a Hugging Face checkpoint that cannot be loaded
          MissingKeysError
          UnexpectedKeysError
          NonFiniteWeightsError
        UnfilledTensorsError                part of a model would be left without a value
      AdapterError (ValueError)           adapters that cannot be put in, loaded under or merged here
      ExportExistsError (FileExistsError) no room for an export where it is to go
      VocabularyError (ValueError, IndexError)  ids without a row, or rows that cannot be added
      SafetensorsError (ValueError)       not the safetensors format
      ChatTemplateError (ValueError)      what is trained of a chat cannot be told
        DroppedTextError                  the template leaves out what an answer says
      TooLongError (ValueError)           a row over max_length that may not be cut
      UnsupportedModelError (ValueError)  a model that this function cannot work with
      PackingError (ValueError)           packed rows would see each other
      BatchError (ValueError)             batches that cannot be trained on, or not by these ranks together
      ModelLossError (ValueError)         a model's own loss is another than is computed here
      NotFusedError (ValueError)          the loss needs the logits
      WrappedModelError (TypeError)       a wrapper around the model whose ranks or gradients cannot be seen
      OptimizerError (TypeError, ValueError)  optimizers or schedulers that a step cannot be taken with
      NonFiniteGradientError (FloatingPointError)
      NoBlocksError (ValueError)          no transformer blocks found
      NotRecomputedError (RuntimeError)   a block chosen for checkpointing runs outside of its checkpoint
      HostMemoryError (MemoryError)       the host has no room for what would be offloaded to it
      NoPlanError (ValueError)            no plan fits
      LostRankError (RuntimeError)        another rank has died or does not answer
      RemoteRankError (RuntimeError)      another rank failed with an error that cannot be sent
"""

from collections.abc import Iterable


class FsdpSftError(Exception):
    """The base of every error type of this library."""


class CheckpointError(FsdpSftError, RuntimeError):
    """Files of a model could not be written or read."""


class CheckpointCorruptError(CheckpointError):
    """Files are damaged, cut short, missing or not of the expected format: use another copy."""


class CheckpointMismatchError(CheckpointError):
    """The files are sound, but of another model or optimizer than the one to load into."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A sound checkpoint of that step is there already; it is never overwritten."""


class CheckpointInUseError(CheckpointError):
    """Another job saves below the same root: give each job a folder of its own."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that place."""


class UnstorableStateError(CheckpointError, TypeError, ValueError):
    """A model or an optimizer has state that a checkpoint cannot hold, or could not give back."""


class CheckpointFormatError(CheckpointError, ValueError):
    """A Hugging Face checkpoint is damaged, unsafe, or does not fit the model."""


class MissingKeysError(CheckpointFormatError):
    """The model has parameters or buffers that the checkpoint has no values for."""


class UnexpectedKeysError(CheckpointFormatError):
    """The checkpoint has tensors that the model has no place for."""


class NonFiniteWeightsError(CheckpointFormatError):
    """A parameter's values in the checkpoint include NaN or infinity."""


class UnfilledTensorsError(CheckpointError):
    """Nothing says what some parameters or buffers should hold; they would keep what was in memory."""


class AdapterError(FsdpSftError, ValueError):
    """Adapters that cannot be put into a model, loaded under, or told apart from it here."""


class ExportExistsError(FsdpSftError, FileExistsError):
    """An export cannot be made where it is to go, because something is there."""


class VocabularyError(FsdpSftError, ValueError, IndexError):
    """Ids of a batch that the model has no row for, or a vocabulary that cannot be given more rows."""


class SafetensorsError(FsdpSftError, ValueError):
    """A file is not sound safetensors, or a tensor cannot be stored as such."""


class ChatTemplateError(FsdpSftError, ValueError):
    """The trained part of a conversation cannot be told for sure with this chat template."""


class TooLongError(FsdpSftError, ValueError):
    """A row has more than ``max_length`` tokens and may not be cut."""


class DroppedTextError(ChatTemplateError):
    """The chat template leaves out a text of an answer that is to be trained."""


class UnsupportedModelError(FsdpSftError, ValueError):
    """The model lacks what a function needs of it; the message says what, and what to do instead."""


class PackingError(FsdpSftError, ValueError):
    """The model does not keep packed rows apart, or it cannot be told whether it does."""


class BatchError(FsdpSftError, ValueError):
    """Batches are not what a step needs, or not of one kind on all ranks; nothing has been computed."""


class ModelLossError(FsdpSftError, ValueError):
    """A model's own loss is not the cross entropy, or a ``loss_fn`` no sum; the message says what it is."""


class NotFusedError(FsdpSftError, ValueError):
    """The loss of a model cannot be computed without its logits; the message says why."""


class WrappedModelError(FsdpSftError, TypeError):
    """The model is wrapped by something whose ranks or gradients cannot be seen; the message names it."""


class OptimizerError(FsdpSftError, TypeError, ValueError):
    """A step cannot be taken with these optimizers or schedulers; nothing has been computed."""


class NonFiniteGradientError(FsdpSftError, FloatingPointError):
    """The gradient norm is NaN or infinite; parameters and optimizer are as they were before the step."""


class NoBlocksError(FsdpSftError, ValueError):
    """No block of the model matches."""


class NotRecomputedError(FsdpSftError, RuntimeError):
    """A block that ``apply_sac`` has chosen does not run through its checkpoint in the model's forward."""


class HostMemoryError(FsdpSftError, MemoryError):
    """The host has no room for activations that are to wait there; nothing was taken of it."""


class NoPlanError(FsdpSftError, ValueError):
    """Nothing fits; the message says what would."""


class LostRankError(FsdpSftError, RuntimeError):
    """Another rank has died, or has not answered within the time-out: end the job and start it again."""


class RemoteRankError(FsdpSftError, RuntimeError):
    """Another rank failed with an error that could not be sent over as it was."""


def abridged(items: Iterable[str], separator: str = ", ", most: int = 8) -> str:
    """The first few items for a message, and how many more there are; a set is put in order."""
    listed = sorted(items) if isinstance(items, (set, frozenset)) else list(items)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return separator.join(listed[:most]) + more

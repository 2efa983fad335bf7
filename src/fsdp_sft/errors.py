"""Every error type of this library.

Each is also a subclass of the built-in exception that callers would expect, so ``except ValueError`` and
``except OSError`` work; ``except FsdpSftError`` catches all of them. Arguments of a wrong type or out of
range raise plain ``TypeError`` and ``ValueError``.

    FsdpSftError
      CheckpointError (RuntimeError)      reading or writing files of a model failed
        CheckpointCorruptError              damaged: use another copy
        CheckpointMismatchError             intact, but of another model or optimizer
        CheckpointExistsError (FileExistsError)  something exists where a checkpoint or an export is to go
        CheckpointInUseError                another job saves below the same root
        CheckpointNotFoundError (FileNotFoundError)  no checkpoint at that place
        UnstorableStateError (TypeError, ValueError)  state that a checkpoint could not restore
        CheckpointFormatError (ValueError)  files of Hugging Face's formats that cannot be read or written
      RowError (ValueError)               a row that cannot be encoded as asked
        ChatTemplateError                   the trained part of a chat cannot be determined
      UnsupportedModelError (TypeError, ValueError)  a model with which this function cannot work
      ModelLossError (ValueError)         a loss that cannot be computed as asked
      PackingError (ValueError)           packed rows would see each other
      BatchError (ValueError)             batches that cannot be trained on, or not by these ranks together
      OptimizerError (TypeError, ValueError)  optimizers or schedulers with which no step can be taken
      NonFiniteGradientError (FloatingPointError)  NaN or infinity in the gradient norm
      NoPlanError (ValueError)            no plan fits into the memory
      LostRankError (RuntimeError)        another rank has died or does not answer
      RemoteRankError (RuntimeError)      another rank failed, or is in a different call
"""

import re
from collections.abc import Iterable

# Characters that move a terminal's cursor, change the order of text, or do not show: controls but for the new
# line and the tab, marks of direction, zero-width ones but for the two that join letters, and tags.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
)


def printable(text: str, most: int | None = None) -> str:
    """A text of others as a terminal can show it: characters that would act there are written as escapes.

    Args:
        text: The text.
        most: Characters after which it is cut, with their number behind it; None shows all of it.
    """
    shown = _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return f"{shown[:most]}... ({len(shown)} characters)" if most and len(shown) > most else shown


class FsdpSftError(Exception):
    """The base of every error type of this library; its text is printable, whatever is quoted in it.

    Example:
        >>> try:
        ...     fs.encode_chat(rows[0], tokenizer, max_length=4, truncation="error")
        ... except fs.FsdpSftError as error:
        ...     print(type(error).__name__)
        RowError
    """

    def __str__(self) -> str:
        return printable(super().__str__(), most=8000)  # a name in a file may be as long as the file


class CheckpointError(FsdpSftError, RuntimeError):
    """Files of a model could not be written or read."""


class CheckpointCorruptError(CheckpointError):
    """Files are damaged, truncated, missing or not of the expected format: use another copy."""


class CheckpointMismatchError(CheckpointError):
    """The files are intact, but belong to another model or optimizer, or leave a tensor without values."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """Something exists where a checkpoint or an export is to be written; it is never overwritten unasked."""


class CheckpointInUseError(CheckpointError):
    """Another job saves below the same root: give each job a folder of its own."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that place."""


class UnstorableStateError(CheckpointError, TypeError, ValueError):
    """A model or an optimizer has state that a checkpoint cannot hold, or could not restore."""


class CheckpointFormatError(CheckpointError, ValueError):
    """A Hugging Face checkpoint or a safetensors file is damaged, unsafe, or does not fit the model.

    Attributes:
        missing: Names of the model's parameters and buffers for which the checkpoint has no values.
        unexpected: Names of the checkpoint's tensors for which the model has no place.
    """

    def __init__(self, *args: object, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> None:
        super().__init__(*args)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)


class RowError(FsdpSftError, ValueError):
    """A row cannot be encoded as asked: it is too long, has an image, or its template does not show enough.

    Attributes:
        reason: The name under which `filter_rows` counts such a row: "malformed", "media", "too_long", and
            for a `ChatTemplateError` "refused_by_template" or "dropped_text". A template that is missing or
            does not parse has "no_template": no row is counted for it.
    """

    reason = "malformed"

    def __init__(self, *args: object, reason: str = "") -> None:
        super().__init__(*args)
        self.reason = reason or self.reason


class ChatTemplateError(RowError):
    """The trained part of a conversation cannot be determined with certainty with this chat template."""

    reason = "refused_by_template"


class UnsupportedModelError(FsdpSftError, TypeError, ValueError):
    """A function cannot work with this model; the message says why, and what to do instead.

    The model lacks something, has no blocks or adapters that are told apart from it, or is in a wrapper that
    hides its ranks or gradients.
    """


class PackingError(FsdpSftError, ValueError):
    """The model does not keep packed rows apart, or it cannot be determined whether it does."""


class BatchError(FsdpSftError, ValueError):
    """Batches lack what a step needs, or differ in kind between ranks; nothing has been computed."""


class ModelLossError(FsdpSftError, ValueError):
    """A loss cannot be computed as asked.

    A model's own loss is not the cross entropy, a ``loss_fn`` is no sum, or ``impl="chunked"`` is asked of a
    model whose loss needs its logits; the message says which.
    """


class OptimizerError(FsdpSftError, TypeError, ValueError):
    """A step cannot be taken with these optimizers or schedulers; nothing has been computed."""


class NonFiniteGradientError(FsdpSftError, FloatingPointError):
    """The gradient norm is NaN or infinite; parameters and optimizer are as they were before the step."""


class NoPlanError(FsdpSftError, ValueError):
    """No plan fits into the memory; the message says what would."""


class LostRankError(FsdpSftError, RuntimeError):
    """Another rank has died, or has not answered within the time-out: end the job and start it again."""


class RemoteRankError(FsdpSftError, RuntimeError):
    """Another rank is in a different call, as where it alone saves, or failed with an error that is not sent.

    The message names both calls, or has the error's text.
    """


def abridged(items: Iterable[str], separator: str = ", ", most: int = 8) -> str:
    """The first few items, for a message, and the number of the others; a set is sorted."""
    listed = sorted(items) if isinstance(items, (set, frozenset)) else list(items)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return separator.join(printable(name.replace("\n", "\\n"), most=400) for name in listed[:most]) + more

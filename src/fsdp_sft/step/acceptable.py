"""Whether the model can take a batch, looked at on the host before the first forward."""

from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp_sft._compat import attention_of
from fsdp_sft._vocabulary import vocabulary_of
from fsdp_sft._wrappers import unwrapped
from fsdp_sft.collate import IGNORE_INDEX, refuse_masked_pack
from fsdp_sft.loss import LABEL_KEYS


def check_of(model: nn.Module, *, own_loss: bool) -> Callable[[Any], None]:
    """What raises for a batch that the model cannot take.

    With an ``own_loss`` labels are the caller's, and so are positions where attention is not transformers'.
    """
    vocabulary = vocabulary_of(model)
    knows_packs = not own_loss or attention_of(unwrapped(model)) != "its own"

    def check(batch: Any) -> None:
        vocabulary.check_ids(batch)
        if knows_packs:
            refuse_masked_pack(batch)
        if not own_loss:
            vocabulary.check_labels(batch, LABEL_KEYS, IGNORE_INDEX)

    return check

"""Checks on the host, before the first forward, that the model can take a batch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from fsdp_sft._compat import attention_of, original_class
from fsdp_sft._meshes import copies_of_rows
from fsdp_sft._vocabulary import vocabulary_of
from fsdp_sft._wrappers import unwrapped
from fsdp_sft.collate import IGNORE_INDEX, refuse_masked_pack
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.loss import LABEL_KEYS
from fsdp_sft.sac import draws_random_numbers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_of(model: nn.Module, *, own_loss: bool) -> Callable[[Any], None]:
    """A function that raises for a batch that the model cannot take.

    With an ``own_loss`` labels are not checked, because they mean what the caller wants; nor are positions,
    unless the attention is transformers'.
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


def refuse_noise_on_same_rows(model: nn.Module, mesh: "DeviceMesh | None") -> None:
    """Refuse a model that draws random numbers on ranks that compute the same rows: they would differ.

    Raises:
        UnsupportedModelError: If ranks share rows (tensor parallelism) and the model has dropout or other
            noise.
    """
    if copies_of_rows(mesh) > 1 and draws_random_numbers(model):
        raise UnsupportedModelError(
            f"{original_class(unwrapped(model)).__name__} has dropout, or other noise, and is cut by tensor "
            "parallelism: ranks with the same rows would draw different random numbers. Set its dropout to 0 "
            "in the config"
        )

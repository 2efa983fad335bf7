"""Verify at a model's first pack that it keeps rows apart, unless that was verified before."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._compat.attention import attention_of
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft.collate import pack_size
from fsdp_sft.errors import PackingError
from fsdp_sft.sampling.packing.rotation import rope_depends_on_length
from fsdp_sft.sampling.packing.verify import verified_length, verify

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LONGEST_PROBE = 4096
_logger = logging.getLogger("fsdp_sft.sampling.packing")


def verify_at_first_use(
    model: nn.Module, batches: Sequence[Any], mesh: "DeviceMesh | None", *, own_loss: bool = False
) -> None:
    """If any rank has a pack, verify, once for each model and attention, that rows are kept apart.

    If rotary embeddings depend on the longest row, each longer row is verified again.

    Args:
        model: Model, sharded or not; left as it was.
        batches: Batches of this rank, packs or not, with the same keys on all ranks.
        mesh: Ranks that hold the model, all of which call this.
        own_loss: Whether the caller passed a loss function; a model that is not from transformers is then not
            verified.

    Raises:
        PackingError: On all ranks, if rows are not kept apart.

    Collective: all ranks of the mesh, unless the model has been verified and its rotary embeddings do not
    depend on the longest row.
    """
    can_be_packs = any(
        isinstance(batch, Mapping)
        and batch.get("position_ids") is not None
        and batch.get("attention_mask") is None
        for batch in batches
    )
    if not can_be_packs or (own_loss and attention_of(unwrapped(model)) == "its own"):
        return
    done = verified_length(model)
    depends = rope_depends_on_length(model)
    if (done and not depends) or torch.compiler.is_compiling():
        return
    sizes = [pack_size(batch) for batch in batches]
    own = (max(size.width for size in sizes), max(size.longest for size in sizes))
    known = all_gather_objects(own) if mesh is not None else [own]
    width, longest = max(width for width, _ in known), max(longest for _, longest in known)
    needed = longest if depends else min(width, _LONGEST_PROBE)
    if not width or done >= needed:
        return
    try:
        _, told = verify(model, needed, mesh, untold_is_error=False)
    except PackingError as error:
        raise PackingError(
            f"the first pack for this model: {error}. verify_packing shows the same before training; "
            "check=False leaves it out, and in a loop of your own loss_sum with scale_for_backward"
        ) from error
    if not told and (mesh is None or mesh.get_rank() == 0):
        _logger.warning(
            "%s with %s attention gets packs, and it cannot be told whether it keeps their rows apart: with "
            "these weights rows hardly matter to each other. Call verify_packing when it has been trained",
            type(unwrapped(model)).__name__,
            attention_of(unwrapped(model)),
        )

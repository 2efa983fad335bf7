"""Measure, on the model at hand, whether padding on the left of a row changes what it computes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._compat.models import original_class
from fsdp_sft._model.inputs import no_cache
from fsdp_sft._model.preserved import preserved, uncompiled
from fsdp_sft._model.sharded import compute_device
from fsdp_sft._model.twin import text_config
from fsdp_sft._model.view import record_of, unwrapped
from fsdp_sft._ranks.mesh import raise_on_mesh
from fsdp_sft._tensors.rounding import logits_tolerance
from fsdp_sft.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_TOKENS, _PADDING = 16, 8


@dataclass
class _ReadAlike:
    """Kept on a model: whether it was given positions, each time that padding on the left changed nothing."""

    with_positions: set[bool] = field(default_factory=set)


def is_padded_on_left(batch: Any) -> bool:
    """Whether the mask of a batch on the host leaves out the first column of a row but not all of it."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not mask.shape[1]:
        return False
    return bool(((mask[:, 0] == 0) & (mask != 0).any(1)).any())


def verify_left_padding(model: nn.Module, mesh: "DeviceMesh | None", *, with_positions: bool) -> None:
    """Refuse a model that computes something else of a row behind padding; looked at once per model.

    Models that count positions from the first column (GPT-2), or carry a state over the padding
    (RecurrentGemma), train on wrong numbers without an error.

    Args:
        model: A causal language model, sharded or not; left as it was.
        mesh: Ranks that hold the model, all of which call this.
        with_positions: Whether the batches have ``position_ids``, which are then those of each row alone.

    Raises:
        UnsupportedModelError: On all ranks, if logits differ by more than rounding explains.

    Collective: all ranks of the mesh, the first time.
    """
    passed = record_of(model).kept_or_new(_ReadAlike).with_positions
    if with_positions in passed:
        return
    error: Exception | None = None
    try:
        difference = left_padding_error(model, with_positions)
        tolerance = logits_tolerance(model, compute_device(model))
        if not difference <= tolerance:
            raise UnsupportedModelError(
                f"{original_class(unwrapped(model)).__name__} reads a row behind padding differently: "
                f"its logits differ by {difference:.1e} of their size (rounding: {tolerance:.0e}). It counts "
                "positions from the first column, or carries a state over the padding. Pad on the right: "
                'SFTCollator does, or tokenizer.padding_side = "right"'
            )
    except Exception as caught:
        error = caught
    raise_on_mesh(error, "verifying that padding on the left changes nothing", mesh)
    passed.add(with_positions)


def left_padding_error(model: nn.Module, with_positions: bool = False) -> float:
    """Median over a row's tokens of how much padding on its left moves logits, relative to their size.

    The median, since rounding routes single tokens of a mixture to other experts.

    Collective: all ranks that hold the model, by two forwards of 16 and 24 tokens.
    """
    device, vocabulary = compute_device(model), getattr(text_config(model), "vocab_size", 8)
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(vocabulary // 4, max(3 * vocabulary // 4, 1), (1, _TOKENS), generator=generator)
    padded = torch.cat([row.new_zeros(1, _PADDING), row], 1)
    mask = (torch.arange(padded.shape[1]) >= _PADDING).long()[None]
    logits = []
    with preserved(model), torch.no_grad(), uncompiled():
        model.eval()
        for ids, seen in ((row, torch.ones_like(row)), (padded, mask)):
            inputs = {"input_ids": ids, "attention_mask": seen}
            if with_positions:
                inputs["position_ids"] = (seen.cumsum(1) - 1).clamp(min=0)
            output = model(**{name: each.to(device) for name, each in inputs.items()}, **no_cache(model))
            logits.append(output.logits[0].float())
    alone, behind = logits
    size = (alone - alone.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((behind[_PADDING:] - alone).norm(dim=-1) / size).median())

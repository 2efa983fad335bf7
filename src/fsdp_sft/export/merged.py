"""The full tensors of a model under the names that it is saved under, with adapters merged into them."""

from collections.abc import Mapping
from typing import Any

import torch

from fsdp_sft._model.adapters import merged_weights
from fsdp_sft._model.named import clean_name
from fsdp_sft._model.state import ModelTensors
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft._tensors.gather import Gatherer
from fsdp_sft._tensors.packed_shard import bits_of
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.export.plan import ExportPlan


def refuse_unmergeable(content: ModelTensors, merges: Mapping[str, Any]) -> None:
    """Refuse adapters that cannot be merged: one layer of each kind is merged, with zeros, by rank 0.

    Args:
        content: The model's tensors.
        merges: Layers with adapters, by name.

    Raises:
        ValueError: If a weight with adapters is tied to another one.
        UnsupportedModelError: If peft does not merge them.
    """
    tied, kinds = {*content.ties, *content.ties.values()}, set()
    for fqn, layer in merges.items():
        if f"{fqn}.weight" in tied:
            raise ValueError(
                f"{fqn} has adapters and its weight is tied to another: merged, both would change. Write the "
                "adapters alone with export_adapter"
            )
        own = layer.state_dict(keep_vars=True)
        kind = (type(layer), *((key, tensor.shape) for key, tensor in own.items()))
        if kind in kinds or this_rank():
            continue
        kinds.add(kind)
        try:
            merged_weights(layer, {key: torch.zeros(t.shape, dtype=_wide(t)) for key, t in own.items()})
        except Exception as error:  # whatever peft raises
            raise UnsupportedModelError(
                f"peft does not merge the adapters of {fqn} into its weights ({type(error).__name__}: "
                f"{error}). Write the adapters alone with export_adapter"
            ) from error


def gathered(
    content: ModelTensors, plan: ExportPlan, merges: Mapping[str, Any], name: str, gathers: Gatherer
) -> torch.Tensor | None:
    """A full tensor, with adapters merged into it if it has any.

    Args:
        content: The model's tensors.
        plan: Plan of the export.
        merges: Layers with adapters, by name.
        name: A source of the plan.
        gathers: What makes full tensors of sharded ones, on some ranks or all.
    """
    source, dtype = plan.sources[name], plan.dtypes[name]
    fqn, _, leaf = source.rpartition(".")
    if fqn not in merges:
        return gathers.gather(content.tensors[source], dtype)
    full = {}
    for key, tensor in merges[fqn].state_dict(keep_vars=True).items():
        part = gathers.gather(tensor, _wide(tensor))
        if part is not None:
            # An unsharded tensor on the host is the model's own memory, into which peft would merge.
            is_own = part.untyped_storage().data_ptr() == bits_of(tensor).untyped_storage().data_ptr()
            full[clean_name(key)] = part.clone() if is_own else part
    if not full:
        return None
    merged: dict[str, torch.Tensor] = {}
    gathers.attempt(lambda: merged.update(merged_weights(merges[fqn], full)))
    return merged[leaf].to(dtype) if merged else None


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which adapters are merged."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype

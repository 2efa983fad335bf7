"""A model's tensors as an export has them, one at a time: for servers that take weights without files."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.conversions import revert_weight_conversion
from fsdp_sft._compat.fsdp import sharded_as
from fsdp_sft._model.adapters import adapted_layers, merged_weights, without_adapters
from fsdp_sft._model.named import clean_name
from fsdp_sft._model.sharded import reshard
from fsdp_sft._model.state import ModelTensors
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._ranks.agree import agreed, share
from fsdp_sft._tensors.gather import Gatherer
from fsdp_sft._tensors.packed_shard import bits_of, values_of
from fsdp_sft.export.plan import ExportPlan, merging_dtype, plan_export, unsharded_twin

T = TypeVar("T")


@torch.no_grad()
def exported(
    content: ModelTensors,
    plan: ExportPlan,
    merges: Mapping[str, Any],
    twin: nn.Module | None,
    gathers: Gatherer,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The core of every export: full tensors under their published names, adapters merged, one at a time.

    Args:
        content: The model's tensors.
        plan: Plan of the export.
        merges: Layers with adapters, by name.
        twin: A model by whose class tensors are converted; None if none are, or on a rank that gathers none.
        gathers: What makes full tensors of sharded ones, on some ranks or all.

    Collective: all ranks.
    """
    for group in plan.groups:
        full: dict[str, torch.Tensor] = {}
        for name in group:
            whole = _gathered(content, plan, merges, name, gathers)
            if whole is not None:
                full[name] = whole
        if group[0] in plan.unchanged:
            full = {plan.unchanged[name]: tensor for name, tensor in full.items()}
        elif full and twin is not None:
            full = gathers.attempt(partial(revert_weight_conversion, twin, full)) or {}
        while full:
            name = next(iter(full))
            yield name, full.pop(name)


def _gathered(
    content: ModelTensors, plan: ExportPlan, merges: Mapping[str, Any], name: str, gathers: Gatherer
) -> torch.Tensor | None:
    """A full tensor, with adapters merged into it if it has any; None where it is not gathered."""
    source, dtype = plan.sources[name], plan.dtypes[name]
    fqn, _, leaf = source.rpartition(".")
    if fqn not in merges:
        return gathers.gather(content.tensors[source], dtype)
    full = {}
    for key, tensor in merges[fqn].state_dict(keep_vars=True).items():
        part = gathers.gather(tensor, merging_dtype(tensor))
        if part is not None:
            # On all ranks an unsharded tensor is the model's own memory, into which peft would merge.
            is_own = part.untyped_storage().data_ptr() == bits_of(tensor).untyped_storage().data_ptr()
            full[clean_name(key)] = part.clone() if is_own else part
    if not full:
        return None
    merged = gathers.attempt(partial(merged_weights, merges[fqn], full))
    return None if merged is None else merged[leaf].to(dtype)


class _OnAllRanks(Gatherer):
    """Gathers full tensors on every rank, where the mesh's collectives run."""

    def gather(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        own = values_of(tensor, dtype).to(dtype)
        if not isinstance(tensor, DTensor):
            return own
        kind = tensor.device_mesh.device_type
        if own.device.type != kind:  # a shard that is kept on the host
            own = own.to(torch.device(kind, torch.accelerator.current_device_index()))
        whole: torch.Tensor = sharded_as(tensor, own.contiguous(), tensor.shape).full_tensor()
        return whole

    def attempt(self, action: Callable[[], T]) -> T:
        return action()


def iter_hf_tensors(
    model: nn.Module, *, dtype: torch.dtype | None = torch.bfloat16
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the tensors that ``export_hf`` would write: published names, adapters merged.

    For an inference server that takes new weights without a folder: ``vllm``'s ``load_weights`` takes such
    pairs, and a program with a group of its own broadcasts them from one rank. The pairs and their order are
    the same on all ranks.

    Args:
        model: A transformers model, sharded or not, or a peft model around one. It does not change.
        dtype: Dtype of floating-point tensors; see ``export_hf``.

    Returns:
        An iterator of (name, full tensor) pairs, the tensor on the device of the mesh. It is the caller's,
        except that a parameter of an unsharded model that has that dtype already shares its memory.

    Raises:
        TypeError: If the model is not a transformers model.
        ValueError: If the model has adapters that cannot be merged.
        UnsupportedModelError: If ``from_pretrained`` would not read the tensors as what was trained.

    Collective: all ranks, at once and with each pair; all must take every pair. All raise the same error.
    Memory: On each rank one full tensor at a time, or one group of tensors that are converted together, such
        as the experts of a layer, twice.

    Example:
        >>> for name, tensor in fs.iter_hf_tensors(model):
        ...     pass  # or send it
        >>> name, tensor.dtype
        ('model.norm.weight', torch.bfloat16)
    """
    model = unwrapped(model)
    reshard(model)
    merges = adapted_layers(model)
    with without_adapters(model, trained=True) as base:
        with agreed("preparing to hand over the tensors"):
            content, plan, _ = plan_export(base, merges, dtype)
            twin: Any = unsharded_twin(base)
        plan = share(plan)
    return exported(content, plan, merges, twin if plan.converts else None, _OnAllRanks())

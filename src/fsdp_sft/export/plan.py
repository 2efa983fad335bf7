"""The plan of an export, made without moving a tensor: what is written, and whether it will be read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_sft._compat.conversions import (
    copy_weight_conversions,
    is_dequantised,
    names_left_out_on_save,
    revert_weight_conversion,
)
from fsdp_sft._compat.models import float32_patterns, original_class
from fsdp_sft._model.adapters import merged_weights
from fsdp_sft._model.state import ModelTensors, model_tensors
from fsdp_sft._model.twin import keep_config, refuse_quantised_model, tied_meta_twin
from fsdp_sft._model.view import inner_model
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.devices import check_dtypes
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft._tensors.safetensors import TensorEntry, num_bytes
from fsdp_sft._tensors.stored import InFile, Stored
from fsdp_sft.errors import CheckpointFormatError, UnsupportedModelError, abridged
from fsdp_sft.export.settings import export_config, further_predictions
from fsdp_sft.weights.plan import make_plan

Described = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class ExportPlan:
    """What an export writes. Rank 0 makes the plan, and all ranks get the same.

    A *source* is a tensor of the model under the name that it is saved under before conversion.

    Attributes:
        sources: The model's first name of the tensor, by source.
        dtypes: Dtype in the files, by source.
        groups: Sources that have to be converted together.
        written: Dtype and shape of each tensor in the files, by name and in order.
        unchanged: Name in the files of each source that is no more than renamed. Some names are renamed only
            where another is there too.
    """

    sources: dict[str, str]
    dtypes: dict[str, torch.dtype]
    groups: list[list[str]]
    written: Described
    unchanged: dict[str, str]

    @property
    def converts(self) -> bool:
        """Whether any tensor is more than renamed."""
        return len(self.unchanged) < len(self.sources)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(num_bytes(*described) for described in self.written.values())


def plan_export(
    model: nn.Module, merges: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[ModelTensors, Any, Any, dict[str, Stored]]:
    """Plan an export by running the conversions on tensors without memory, after all checks.

    Args:
        model: A transformers model, without adapters around it.
        merges: Its layers with adapters, by name.
        dtype: Dtype of floating-point tensors in the files; None keeps the dtypes that they have.

    Returns:
        The model's tensors, and on rank 0 the ``ExportPlan``, the config to export, and the tensors that are
        copied from the files of the base.

    Raises:
        TypeError: If the model is no transformers model.
        ValueError, UnsupportedModelError: If adapters cannot be merged, or the export would not be read back
            as it is in the model.
    """
    import transformers

    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(
            f"export_hf takes a transformers model, got {type(model).__name__}{inner_model(model)}; "
            "save_full_state_dict writes any model"
        )
    check_dtypes(dtype=dtype)
    refuse_quantised_model(model)
    keep_config(model)
    content = model_tensors(model)
    refuse_unmergeable(content, merges)
    if this_rank() != 0:
        return content, None, None, {}
    twin = unsharded_twin(model)
    sources = _sources(model, twin, content)
    dtypes = _dtypes(model, content, sources, dtype)
    meta = {
        name: torch.empty(content.tensors[first].shape, dtype=dtypes[name], device="meta")
        for name, first in sources.items()
    }
    final = revert_weight_conversion(twin, meta)
    written = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in final.items()}
    names = {id(tensor): name for name, tensor in final.items()}
    unchanged = {name: names[id(tensor)] for name, tensor in meta.items() if id(tensor) in names}
    groups: dict[str, list[str]] = {}
    for name in meta:
        block = re.match(r"\D*\d*", name)
        groups.setdefault(name if name in unchanged else f"block {block and block[0]}", []).append(name)
    config = export_config(model, content, dtype)
    tensors = {name: content.tensors[sources[name]] for name in unchanged}
    buffers = {unchanged[name] for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
    refuse_unreadable(model, config, written, buffers)
    copied = further_predictions(config, written)
    for name, tensor in copied.items():  # bytes as they are, or the values of quantised ones
        own = tensor.entry.dtype if isinstance(tensor, InFile) else dtype or model.dtype
        written[name] = own, tensor.entry.shape
    plan = ExportPlan(sources, dtypes, [*groups.values()], written, unchanged)
    return content, plan, config, copied


def refuse_unreadable(model: Any, config: Any, written: Described, buffers: set[str]) -> None:
    """Compare an export's names, shapes and dtypes with what the class that its config names would read.

    It is done before the files are written.

    Args:
        model: A transformers model.
        config: Config of the export.
        written: Dtype and shape of each tensor in the files, by name.
        buffers: Names of those that are no parameters; the class need not have a place for them.

    Raises:
        UnsupportedModelError: If a parameter would not be read, or a tensor would be drawn at random.
    """
    stored = {
        name: InFile(Path(), TensorEntry(dtype, shape, 0, num_bytes(dtype, shape)))
        for name, (dtype, shape) in written.items()
    }
    own, unexpected = original_class(model).__name__, list[str]()
    try:
        unexpected = make_plan(tied_meta_twin(model, config), stored, unexpected="ignore").unexpected
        unread = [name for name in unexpected if name not in buffers]
        what = f"its class has no place for {abridged(unread)}" if unread else ""
    except CheckpointFormatError as error:
        what = str(error).partition(";")[0]
    if what:
        raise UnsupportedModelError(
            f"an export of this {own} would not be read as it was trained: {what}. Merge what was put into "
            "the model, or take it out, before the export (adapters of peft are merged by it); "
            "save_full_state_dict writes any model"
        )
    if unexpected:
        warn_caller(f"buffers of the model are exported that {own} does not read: {abridged(unexpected)}")


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
            merged_weights(
                layer, {key: torch.zeros(t.shape, dtype=merging_dtype(t)) for key, t in own.items()}
            )
        except Exception as error:  # whatever peft raises
            raise UnsupportedModelError(
                f"peft does not merge the adapters of {fqn} into its weights ({type(error).__name__}: "
                f"{error}). Write the adapters alone with export_adapter"
            ) from error


def merging_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which adapters are merged."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


def unsharded_twin(model: nn.Module) -> nn.Module:
    """``model`` if transformers can save it as it is, else its architecture on the meta device, unsharded."""
    if not (is_dequantised(model) or any(isinstance(module, FSDPModule) for module in model.modules())):
        return model
    twin = tied_meta_twin(model)
    copy_weight_conversions(model, twin)
    return twin


def _sources(model: nn.Module, twin: nn.Module, content: ModelTensors) -> dict[str, str]:
    """The model's first name of each tensor, by the name under which ``save_pretrained`` saves it.

    Names that are tied in the model, but not in a model built from its config, are all written.
    """
    ignored, tied_patterns = names_left_out_on_save(twin)
    aliases: dict[str, list[str]] = {}
    for name, first in content.names.items():
        aliases.setdefault(first, []).append(name)
    as_read: dict[str, int] = {}
    if any(len(names) > 1 for names in aliases.values()):
        reader = tied_meta_twin(model) if twin is model else twin
        as_read = {name: id(tensor) for name, tensor in reader.state_dict(keep_vars=True).items()}
    together: dict[tuple[str, int | None], list[str]] = {}
    for first, names in aliases.items():
        for name in names:
            together.setdefault((first, as_read.get(name)), []).append(name)
    kept = set()
    for names in together.values():
        main = [name for name in names if not any(re.search(pattern, name) for pattern in tied_patterns)]
        kept.add(main[0] if main else max(names))
    return {name: first for name, first in content.names.items() if name in kept and name not in ignored}


def _dtypes(
    model: nn.Module, content: ModelTensors, sources: Mapping[str, str], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Dtype in the files of each source."""
    patterns = float32_patterns(model, dtype) if dtype is not None else set()
    dtypes = {}
    for name, first in sources.items():
        own = content.tensors[first].dtype
        in_float32 = any(re.search(rf"(?:^|\.){re.escape(p)}(?:\.|$)", name) for p in patterns)
        wanted = torch.float32 if in_float32 else dtype
        dtypes[name] = wanted if wanted is not None and own.is_floating_point else own
    return dtypes

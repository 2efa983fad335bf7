"""The plan of an export, made without moving a tensor: what is written, and whether it will be read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.conversions import (
    copy_weight_conversions,
    names_left_out_on_save,
    revert_weight_conversion,
)
from fsdp_sft._compat.models import float32_names
from fsdp_sft._model.published import (
    ModelTensors,
    layers_to_merge,
    model_tensors,
    published,
    refuse_unmergeable,
)
from fsdp_sft._model.twin import keep_config, refuse_quantised_model, tied_meta_twin
from fsdp_sft._model.view import inner_model, reshard
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.devices import check_dtypes
from fsdp_sft._ranks.agree import agreed, share, this_rank
from fsdp_sft._tensors.safetensors import TensorEntry, num_bytes
from fsdp_sft._tensors.stored import InFile, Stored
from fsdp_sft.errors import CheckpointFormatError, UnsupportedModelError, abridged
from fsdp_sft.export.settings import export_config, further_predictions
from fsdp_sft.weights.plan import make_plan

Described = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass
class ExportPlan:
    """What an export writes, and what it is made of.

    A *source* is a tensor of the model under the name that it is saved under before conversion.

    Attributes:
        model: The transformers model inside what was put around it.
        content: Its tensors, without those of what was put around its layers.
        merges: Its layers whose weights are merged, by name.
        twin: A model of its class and config on the meta device, by which tensors are converted.
        groups: Sources that have to be converted together: for each the model's first name of the tensor, and
            its dtype in the files. Rank 0 decides, and all ranks get the same.
        unchanged: Name in the files of each source that is no more than renamed. Some names are renamed only
            where another is there too. As on rank 0.
        written: On rank 0 dtype and shape of each tensor in the files, by name and in order.
        config: On rank 0 the config to export.
        copied: On rank 0 the tensors that are copied from the files of the base.
    """

    model: Any
    content: ModelTensors
    merges: Mapping[str, Any]
    twin: nn.Module
    groups: list[dict[str, tuple[str, torch.dtype]]] = field(default_factory=list)
    unchanged: dict[str, str] = field(default_factory=dict)
    written: Described = field(default_factory=dict)
    config: Any = None
    copied: dict[str, Stored] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files; 0 on other ranks than 0."""
        return sum(num_bytes(*described) for described in self.written.values())

    @property
    def num_parameters(self) -> int:
        """Number of the model's own parameters."""
        return sum(t.numel() for t in self.content.tensors.values() if isinstance(t, nn.Parameter))


def plan_export(model: nn.Module, dtype: torch.dtype | None, phase: str) -> ExportPlan:
    """Plan an export without moving a tensor, after all checks.

    Args:
        model: A transformers model, in wrappers and with adapters or not.
        dtype: Dtype of floating-point tensors in the files; None keeps the dtypes that they have.
        phase: What the ranks do, for errors.

    Raises:
        TypeError: If the model is no transformers model.
        ValueError, UnsupportedModelError: If adapters cannot be merged, or the export would not be read back
            as it is in the model.

    Collective: all ranks.
    """
    import transformers

    model = reshard(model)
    merges = layers_to_merge(model)
    with published(model, trained=True) as base, agreed(phase):
        if not isinstance(base, transformers.PreTrainedModel):
            raise TypeError(
                f"export_hf takes a transformers model, got {type(base).__name__}{inner_model(base)}; "
                "save_full_state_dict writes any model"
            )
        check_dtypes(dtype=dtype)
        refuse_quantised_model(base)
        keep_config(base)
        content, twin = model_tensors(base), tied_meta_twin(base)
        refuse_unmergeable(content, merges)
        # transformers finds conversions by the name of the class, which FSDP2 replaces in the model.
        copy_weight_conversions(base, twin)
        plan = ExportPlan(base, content, merges, twin)
        if this_rank() == 0:
            _decide(plan, dtype)
    plan.groups, plan.unchanged = share((plan.groups, plan.unchanged))
    return plan


def _decide(plan: ExportPlan, dtype: torch.dtype | None) -> None:
    """Fill in what rank 0 decides, by running the conversions on tensors without memory.

    Raises:
        UnsupportedModelError: If the export would not be read back as it is in the model.
    """
    model, tensors = plan.model, plan.content.tensors
    sources = _sources(plan.twin, plan.content)
    dtypes = _dtypes(model, {name: tensors[first].dtype for name, first in sources.items()}, dtype)
    meta = {
        name: torch.empty(tensors[first].shape, dtype=dtypes[name], device="meta")
        for name, first in sources.items()
    }
    final = revert_weight_conversion(plan.twin, meta)
    plan.written = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in final.items()}
    names = {id(tensor): name for name, tensor in final.items()}
    plan.unchanged = {name: names[id(tensor)] for name, tensor in meta.items() if id(tensor) in names}
    groups: dict[str, dict[str, tuple[str, torch.dtype]]] = {}
    for name, first in sources.items():
        block = re.sub(r"(?<=\d)\D.*", "", name)  # up to its first number
        group = groups.setdefault(name if name in plan.unchanged else f"block {block}", {})
        group[name] = first, dtypes[name]
    plan.groups = [*groups.values()]
    plan.config = export_config(model, plan.twin, plan.content, dtype)
    buffers = {
        final_name
        for name, final_name in plan.unchanged.items()
        if not isinstance(tensors[sources[name]], nn.Parameter)
    }
    refuse_unreadable(plan.twin, plan.config, plan.written, buffers)
    plan.copied = further_predictions(plan.config, plan.written)
    for name, stored in plan.copied.items():  # bytes as they are, or the values of quantised ones
        own = stored.entry.dtype if isinstance(stored, InFile) else dtype or model.dtype
        plan.written[name] = own, stored.entry.shape


def refuse_unreadable(twin: Any, config: Any, written: Described, buffers: set[str]) -> None:
    """Compare an export's names, shapes and dtypes with what the class that its config names would read.

    It is done before the files are written.

    Args:
        twin: A model of the same class.
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
    own, unexpected = type(twin).__name__, list[str]()
    try:
        unexpected = make_plan(tied_meta_twin(twin, config), stored, unexpected="ignore").unexpected
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


def _sources(twin: nn.Module, content: ModelTensors) -> dict[str, str]:
    """The model's first name of each tensor, by the name under which ``save_pretrained`` saves it.

    Names that are tied in the model, but not in a model built from its config, are all written.
    """
    ignored, tied_patterns = names_left_out_on_save(twin)
    as_read = {name: id(tensor) for name, tensor in twin.state_dict(keep_vars=True).items()}
    together: dict[tuple[str, int | None], list[str]] = {}
    for name, first in content.names.items():
        together.setdefault((first, as_read.get(name)), []).append(name)
    kept = set()
    for names in together.values():
        main = [name for name in names if not any(re.search(pattern, name) for pattern in tied_patterns)]
        kept.add(main[0] if main else max(names))
    return {name: first for name, first in content.names.items() if name in kept and name not in ignored}


def _dtypes(
    model: nn.Module, own: Mapping[str, torch.dtype], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Dtype in the files of each source, by those that they have."""
    float32 = re.compile("(?!)") if dtype is None else float32_names(model, dtype)
    wanted = {name: torch.float32 if float32.search(name) else dtype for name in own}
    return {name: (wanted[name] or had) if had.is_floating_point else had for name, had in own.items()}

"""Export to a Hugging Face folder with the contents that ``save_pretrained`` of an unsharded model writes."""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.conversions import (
    copy_weight_conversions,
    is_dequantised,
    names_left_out_on_save,
    revert_weight_conversion,
)
from fsdp_sft._compat.fsdp import sharded_as
from fsdp_sft._compat.models import float32_patterns, original_class
from fsdp_sft._model.adapters import adapted_layers, merged_weights, without_adapters
from fsdp_sft._model.sharded import reshard
from fsdp_sft._model.state import ModelTensors, model_tensors
from fsdp_sft._model.twin import keep_config, refuse_quantised_model, tied_meta_twin
from fsdp_sft._model.view import clean_name, inner_model, unwrapped
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.devices import check_dtypes
from fsdp_sft._ranks.agree import agreed, share, tell, this_rank
from fsdp_sft._tensors.boxes import values_of, whole
from fsdp_sft._tensors.disk import check_room, write_bytes, write_early
from fsdp_sft._tensors.gather import Gatherer
from fsdp_sft._tensors.reader import do_reads
from fsdp_sft._tensors.safetensors import TensorEntry, bytes_of, create, force_to_disk, num_bytes
from fsdp_sft._tensors.stored import InFile, Stored
from fsdp_sft.errors import CheckpointFormatError, UnsupportedModelError, abridged
from fsdp_sft.export.settings import export_config, further_predictions, write_settings
from fsdp_sft.export.target import check_target, export_target, new_folder
from fsdp_sft.weights.plan import make_plan

_logger = logging.getLogger(__name__)
T = TypeVar("T")
Described = dict[str, tuple[torch.dtype, tuple[int, ...]]]

# The plan of an export, made without moving a tensor.


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


# The export: what a plan says is gathered, converted and written, one tensor or group at a time.


def export_hf(
    model: nn.Module,
    out_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    chat_template: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a folder that ``from_pretrained`` and serving engines read: weights, index, configuration, card.

    Names and shapes are those of ``save_pretrained`` on the unsharded model. Tied weights are written
    once. Where transformers loads an architecture in another format than the Hub has it (Mixtral's experts,
    for instance, are one tensor in memory and many on the Hub), the Hub's format is written. The folder
    appears under its name only when it is complete.

    Adapters of peft are merged into the weights that are written, not into the model. ``export_adapter``
    writes adapters alone.

    Args:
        model: A transformers model, sharded or not, or a peft model around one.
        out_dir: Folder to make; it may exist if it is empty. ``check_export`` says before training whether it
            can be made. If it is no longer empty at the time of the export, the export is written beside it,
            with ``-2`` or the next free number at the end of the name, and a warning says so: a trained model
            is not lost because of a folder's name. Rank 0 writes.
        dtype: Dtype of floating-point tensors in the files, except those of modules that transformers always
            keeps in float32; None keeps the dtypes that they have. It goes into the configuration too.
        max_shard_size: Largest size of one file, in bytes or as text such as ``"5GB"``.
        tokenizer: Tokenizer or processor to save beside the model. If it has a chat template, the token that
            ends an answer goes into ``generation_config.eos_token_id``, in front of the others, so that the
            model stops where it was trained to stop.
        chat_template: Template with which rows were encoded, if it is not the tokenizer's own: its text, or
            the name of one of the tokenizer's. It is saved with the tokenizer; the tokenizer object that is
            passed does not change.
        overwrite: Whether the files of an earlier export in ``out_dir`` (weights, configuration, tokenizer)
            are replaced by the new ones when these are complete; other files there stay.

    Returns:
        The folder: ``out_dir``, unless there was a warning.

    Raises:
        TypeError: If the model is not a transformers model.
        ValueError: If the model has adapters that cannot be merged.
        UnsupportedModelError: If ``from_pretrained`` would not read the export as what was trained.
        OSError: If writing fails; raised on all ranks. An incomplete export leaves nothing
            behind.

    Collective: all ranks.
    Memory: On rank 0 one full tensor, or twice one group that is converted together, and on other ranks their
        own part of one tensor. All of it is CPU memory. A weight with adapters is at least float32 while they
        are merged.

    Example:
        >>> folder = fs.export_hf(model, "out", tokenizer=tokenizer)
        >>> from transformers import AutoModelForCausalLM
        >>> AutoModelForCausalLM.from_pretrained(folder).dtype
        torch.bfloat16
    """
    started = time.perf_counter()
    model = unwrapped(model)
    reshard(model)
    merges = adapted_layers(model)
    files: WeightFiles | None = None
    base: Any
    with (
        without_adapters(model, trained=True) as base,
        ExitStack() as opened,
        new_folder(out_dir, overwrite=overwrite) as export,
    ):
        target, temporary = export.target, export.temporary
        with agreed(f"preparing to export to {target}"):
            content, plan, config, copied = plan_export(base, merges, dtype)
            if plan is not None:
                check_room(target.parent, plan.num_bytes, f"the export to {target}")
                write_settings(base, config, temporary, target.name, dtype, tokenizer, chat_template)
                parameters = base.num_parameters()
                files = WeightFiles(temporary, plan.written, max_shard_size, parameters, opened)
        plan, gatherer = share(plan), Gatherer()
        twin = unsharded_twin(base) if plan.converts and files is not None else None
        for name, tensor in exported(content, plan, merges, twin, gatherer):
            if files is not None:
                gatherer.attempt(partial(files.write, name, tensor))
        if files is not None:
            for name, stored in copied.items():
                gatherer.attempt(partial(files.copy, name, stored))
            gatherer.attempt(files.finish)
        gatherer.finish(f"exporting to {target}")
    tell(_logger, "exported in %.2f s: %s", time.perf_counter() - started, export.folder)
    folder: Path = export.folder
    return folder


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
            # It may be the model's own memory, into which peft would merge.
            full[clean_name(key)] = part.clone()
    if not full:
        return None
    merged = gathers.attempt(partial(merged_weights, merges[fqn], full))
    return None if merged is None else merged[leaf].to(dtype)


class WeightFiles:
    """The weight files and their index, which rank 0 makes at their final size and fills in any order.

    Args:
        folder: Folder of the export.
        written: Dtype and shape of every tensor, by name and in order.
        max_shard_size: Largest size of one file, in bytes or as text such as ``"5GB"``.
        num_parameters: Number of the model's parameters, which goes into the index.
        opened: Closes the files at its end.
    """

    def __init__(
        self,
        folder: Path,
        written: Described,
        max_shard_size: int | str,
        num_parameters: int,
        opened: ExitStack,
    ) -> None:
        from huggingface_hub import split_state_dict_into_shards_factory

        self._left = dict(written)
        self._places: dict[str, tuple[int, int]] = {}  # file of each tensor, and the byte at which it begins
        split = split_state_dict_into_shards_factory(
            written,
            get_storage_size=lambda described: num_bytes(*described),
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        for file, names in split.filename_to_tensors.items():
            fd, header, _ = create(folder / file, {name: written[name] for name in names}, {"format": "pt"})
            opened.callback(os.close, fd)
            self._places.update({name: (fd, header.entries[name].start) for name in names})
        if split.is_sharded:
            index = {
                "metadata": {"total_parameters": num_parameters, **split.metadata},
                "weight_map": dict(split.tensor_to_filename),
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            write_bytes(folder / "model.safetensors.index.json", text.encode())

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a full tensor.

        Raises:
            RuntimeError: If no tensor of that name, dtype and shape remains to be written.
        """
        if self._left.pop(name, None) != (tensor.dtype, tuple(tensor.shape)):
            raise RuntimeError(
                f"{name} came out as {tensor.dtype} {tuple(tensor.shape)} when converted apart from the "
                "rest of the model; please report the architecture"
            )
        fd, start = self._places[name]
        contiguous = tensor.contiguous()
        write_early(fd, start, bytes_of(contiguous))

    def copy(self, name: str, stored: Stored) -> None:
        """Copy a tensor from the files of the base."""
        dtype, shape = self._left[name]
        values = torch.empty(shape, dtype=dtype)
        do_reads(stored.reads(stored.piece(name), whole(shape), values))
        self.write(name, values)

    def finish(self) -> None:
        """Force what was written to the disk.

        Raises:
            RuntimeError: If a tensor was not written.
        """
        if self._left:
            raise RuntimeError(
                f"no tensor was converted to {sorted(self._left)[:4]}; please report the architecture"
            )
        for fd in {fd for fd, _ in self._places.values()}:
            force_to_disk(fd)


# The tensors of an export one at a time, for servers that take weights without files.


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
            content, plan, _, _ = plan_export(base, merges, dtype)
            twin: Any = unsharded_twin(base)
        plan = share(plan)
    return exported(content, plan, merges, twin if plan.converts else None, _OnAllRanks())


# A check before training that the export after it can be written and read.


def check_export(
    out_dir: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    overwrite: bool = False,
) -> Path:
    """Find out before training whether ``export_hf`` and ``export_adapter`` can write to a folder.

    Call it at the start of a program with the arguments of the export at its end. Nothing is changed; a file
    is made in the folder, or where the folder would be, and removed.

    Args:
        out_dir: Folder of the export. Rank 0 looks.
        model: The model that ``export_hf`` will get, sharded or not, with its adapters if it has any; its
            weights do not have to be loaded. None checks the folder alone.
        overwrite: Whether the export will be called with ``overwrite=True``.

    Returns:
        The folder as an absolute path.

    Raises:
        CheckpointExistsError: If something is there: a file, a mounted file system, or a folder that is not
            empty (which ``overwrite`` allows).
        PermissionError: If this process cannot write there.
        OSError: If the disk has less room than the export in bfloat16 takes (``ENOSPC``).
        UnsupportedModelError: If ``from_pretrained`` would not read the export of this model as what was
            trained: parts were put into it that its class does not have, or its weights are quantised.
        UnsupportedModelError, ValueError: If its adapters cannot be merged.

    Collective: all ranks; all raise the same error.

    Example:
        >>> fs.check_export("out").name  # before training
        'out'
        >>> folder = fs.export_hf(model, "out")  # after it
        >>> fs.check_export("out")
        Traceback (most recent call last):
        ...
        fsdp_sft.errors.CheckpointExistsError: ... exists and is not an empty folder; ...
        >>> fs.check_export("out", overwrite=True).name
        'out'
    """
    target = export_target(out_dir)
    model = unwrapped(model) if isinstance(model, nn.Module) else model
    merges = {} if model is None else adapted_layers(model)
    taken = nullcontext() if model is None else without_adapters(model, trained=True)
    with taken as base, agreed(f"checking that {target} can be exported to"):
        plan = plan_export(base, merges, torch.bfloat16)[1] if base is not None else None
        if this_rank() == 0:
            check_target(target, overwrite=overwrite, need=plan.num_bytes if plan is not None else 0)
    return target

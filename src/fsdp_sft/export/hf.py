"""Export to Hugging Face folders as ``save_pretrained`` of an unsharded model writes them; adapters alone."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.conversions import revert_weight_conversion
from fsdp_sft._compat.fsdp import sharded_as
from fsdp_sft._model.published import merged_weights, merging_dtype, model_tensors
from fsdp_sft._model.view import clean_name, plain_names, reshard, with_tensors
from fsdp_sft._ranks.agree import agreed, tell, this_rank
from fsdp_sft._tensors.boxes import values_of, whole
from fsdp_sft._tensors.disk import check_room, write_bytes, write_early
from fsdp_sft._tensors.gather import Gatherer
from fsdp_sft._tensors.reader import do_reads
from fsdp_sft._tensors.safetensors import bytes_of, create, force_to_disk, num_bytes
from fsdp_sft._tensors.stored import Stored
from fsdp_sft.export.plan import ExportPlan, plan_export
from fsdp_sft.export.settings import write_chat, write_settings
from fsdp_sft.export.target import check_target, export_target, new_folder

if TYPE_CHECKING:
    from peft import PeftModel

_logger = logging.getLogger(__name__)


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
    plan = plan_export(model, dtype, f"planning the export to {out_dir}")
    gatherer = Gatherer()
    files: Any = None
    with ExitStack() as opened, new_folder(out_dir, overwrite=overwrite) as export:
        target, temporary = export.target, export.temporary
        with agreed(f"preparing to export to {target}"):
            if this_rank() == 0:
                check_room(target.parent, plan.num_bytes, f"the export to {target}")
                write_settings(
                    plan.model,
                    type(plan.twin),
                    plan.config,
                    temporary,
                    target.name,
                    plan.num_parameters,
                    tokenizer,
                    chat_template,
                )
                files = WeightFiles(temporary, plan, max_shard_size, opened)
        for name, tensor in exported(plan, gatherer):
            gatherer.attempt(partial(files.write, name, tensor))
        if files is not None:
            gatherer.attempt(partial(files.finish, plan.copied))
        gatherer.finish(f"exporting to {target}")
    tell(_logger, "exported in %.2f s: %s", time.perf_counter() - started, export.folder)
    return Path(export.folder)


@torch.no_grad()
def exported(plan: ExportPlan, gathers: Gatherer) -> Iterator[tuple[str, torch.Tensor]]:
    """The core of every export: full tensors under their published names, adapters merged, one at a time.

    Args:
        plan: Plan of the export.
        gathers: What makes full tensors of sharded ones, on some ranks or all; on the others there are none.

    Collective: all ranks.
    """
    for group in plan.groups:
        full = {
            name: tensor
            for name, (first, dtype) in group.items()
            if (tensor := _gathered(plan, first, dtype, gathers)) is not None
        }
        if group.keys() <= plan.unchanged.keys():
            full = {plan.unchanged[name]: tensor for name, tensor in full.items()}
        elif full:
            full = gathers.attempt(partial(revert_weight_conversion, plan.twin, full)) or {}
        yield from full.items()
        full.clear()  # before the next group is gathered


def _gathered(plan: ExportPlan, first: str, dtype: torch.dtype, gathers: Gatherer) -> torch.Tensor | None:
    """A full tensor, with adapters merged into it if it has any; None where it is not gathered."""
    fqn, _, leaf = first.rpartition(".")
    layer = plan.merges.get(fqn)
    sources = {leaf: plan.content.tensors[first]} if layer is None else layer.state_dict(keep_vars=True)
    full = {  # a clone, as it may be the model's own memory, into which peft would merge
        clean_name(key): part if layer is None else part.clone()
        for key, tensor in sources.items()
        if (part := gathers.gather(tensor, dtype if layer is None else merging_dtype(tensor))) is not None
    }
    if layer is not None and full:
        full = gathers.attempt(partial(merged_weights, layer, full)) or {}
    return full[leaf].to(dtype) if full else None


class WeightFiles:
    """The weight files and their index, which rank 0 makes at their final size and fills in any order.

    Args:
        folder: Folder of the export.
        plan: Plan of the export.
        max_shard_size: Largest size of one file, in bytes or as text such as ``"5GB"``.
        opened: What closes the files.
    """

    def __init__(self, folder: Path, plan: ExportPlan, max_shard_size: int | str, opened: ExitStack) -> None:
        from huggingface_hub import split_state_dict_into_shards_factory

        self._left = dict(plan.written)
        self._places: dict[str, tuple[int, int]] = {}  # file of each tensor, and the byte at which it begins
        split = split_state_dict_into_shards_factory(
            plan.written,
            get_storage_size=lambda described: num_bytes(*described),
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        for file, names in split.filename_to_tensors.items():
            fd, header, _ = create(
                folder / file, {name: plan.written[name] for name in names}, {"format": "pt"}
            )
            opened.callback(os.close, fd)
            self._places.update({name: (fd, header.entries[name].start) for name in names})
        if split.is_sharded:
            index = {
                "metadata": {"total_parameters": plan.num_parameters, **split.metadata},
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

    def finish(self, copied: Mapping[str, Stored]) -> None:
        """Copy the tensors that come from the files of the base, and force all to the disk.

        Raises:
            RuntimeError: If a tensor was not written.
        """
        for name, stored in copied.items():
            dtype, shape = self._left[name]
            values = torch.empty(shape, dtype=dtype)
            do_reads(stored.reads(stored.piece(name), whole(shape), values))
            self.write(name, values)
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
        return sharded_as(tensor, own.contiguous(), tensor.shape).full_tensor()  # type: ignore[no-any-return]

    def attempt(self, action: Callable[[], Any]) -> Any:
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
    return exported(plan_export(model, dtype, "preparing to hand over the tensors"), _OnAllRanks())


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
        The folder as an absolute path; where a file system is mounted, one below that.

    Raises:
        CheckpointExistsError: If something is there: a file, or a folder that is not empty (which
            ``overwrite`` allows).
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
    phase = f"checking that {target} can be exported to"
    need = 0 if model is None else plan_export(model, torch.bfloat16, phase).num_bytes
    with agreed(phase):
        if this_rank() == 0:
            check_target(target, overwrite=overwrite, need=need)
    return target


# Adapters without their base model, in peft's own format.


def export_adapter(
    model: "PeftModel",
    out_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    chat_template: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the active adapter as ``PeftModel.save_pretrained`` would: weights, configuration, card.

    ``PeftModel.from_pretrained(base_model, out_dir)`` reads the folder, and so do engines that serve adapters
    of a base model. It holds the adapter and the copies of ``modules_to_save``, and appears under its name
    only when it is complete.

    Args:
        model: A peft model, sharded or not.
        out_dir: Folder to make, as in ``export_hf``. ``check_export`` looks at it before training. Rank 0
            writes.
        dtype: Dtype of the adapter's tensors in the file; None keeps the dtypes that they have.
        tokenizer: Tokenizer to save beside the adapter, together with ``generation_config.json``; see
            ``export_hf``.
        chat_template: Chat template with which rows were encoded; see ``export_hf``.
        overwrite: Whether the files of an earlier adapter in ``out_dir`` are replaced; other files stay.

    Returns:
        The folder: ``out_dir``, unless there was a warning.

    Raises:
        TypeError: If the model is not a peft model.
        ValueError: If several adapters are active.
        OSError: If writing fails; raised on all ranks.

    Collective: all ranks.
    Memory: On rank 0 the adapter's full tensors, in CPU memory.

    Example:
        >>> from peft import LoraConfig
        >>> lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        >>> model = fs.load_pretrained(path, mesh=mesh, peft_config=lora)
        >>> folder = fs.export_adapter(model, "adapter")
        >>> sorted(file.name for file in folder.iterdir())
        ['README.md', 'adapter_config.json', 'adapter_model.safetensors']
    """
    model = reshard(model)
    with plain_names(model), new_folder(out_dir, overwrite=overwrite) as export:
        with agreed(f"preparing to export to {export.target}"):
            name, wanted = _saved_by_peft(model)
        gatherer = Gatherer()
        gathered = {key: gatherer.gather(tensor, dtype or tensor.dtype) for key, tensor in wanted.items()}
        gatherer.finish(f"gathering the adapter for {export.target}")
        with agreed(f"exporting to {export.target}"):
            if this_rank() == 0:
                _save(model, export.temporary, gathered, name)
                if tokenizer is not None or chat_template is not None:
                    base = model.get_base_model()
                    write_chat(export.temporary, base, model.config, tokenizer, chat_template)
    return Path(export.folder)


def _saved_by_peft(model: "PeftModel") -> tuple[str, dict[str, torch.Tensor]]:
    """The one active adapter, and the tensors that peft would save of it, by name in the model's order."""
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(model, PeftModel):
        raise TypeError(
            f"export_adapter takes a model with peft's adapters, got {type(model).__name__}; export_hf "
            "writes any transformers model"
        )
    active = model.active_adapters
    if len(active) != 1:
        raise ValueError(f"one adapter is exported at a time, and {active} are active; call set_adapter")
    (name,), content = active, model_tensors(model)
    own = {key: content.tensors[first] for key, first in content.names.items()}
    if model.peft_config[name].is_prompt_learning:  # peft saves what its encoder computes
        own_parts = (f"prompt_encoder.{name}.", f".modules_to_save.{name}.")
        return name, {key: own[key] for key in own if any(part in key for part in own_parts)}
    saved = get_peft_model_state_dict(model, own, adapter_name=name, save_embedding_layers=False)
    kept = {id(tensor) for tensor in saved.values()}
    return name, {key: tensor for key, tensor in own.items() if id(tensor) in kept}


def _save(model: "PeftModel", folder: Path, full: dict[str, Any], name: str) -> None:
    """Let peft write the adapter's full tensors, configuration and card."""
    encoders = getattr(model, "prompt_encoder", {})
    own = dict(encoders.items())
    try:
        for key in own.keys() & {name}:
            encoders[key] = with_tensors(own[key], full, f"prompt_encoder.{key}.")
        model.save_pretrained(
            str(folder), selected_adapters=[name], state_dict=full, save_embedding_layers=False
        )
    finally:
        encoders.update(own)
    if name != "default":  # peft puts an adapter of another name into a folder of that name
        for path in (folder / name).iterdir():
            path.rename(folder / path.name)
        (folder / name).rmdir()

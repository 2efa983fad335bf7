"""Export to a Hugging Face folder with the contents that ``save_pretrained`` of an unsharded model writes."""

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.adapters import adapted_layers, without_adapters
from fsdp_sft._model.blocks import configs_without_caches
from fsdp_sft._model.sharded import reshard
from fsdp_sft._model.state import ModelTensors
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._process.words import answered
from fsdp_sft._ranks.agree import agreed, all_gather_objects, share, tell, this_rank
from fsdp_sft._tensors.disk import write_bytes, write_early
from fsdp_sft._tensors.gather import Gatherer
from fsdp_sft._tensors.packed_shard import values_of
from fsdp_sft._tensors.safetensors import bytes_of, create, force_to_disk, num_bytes, write_at
from fsdp_sft._tensors.sharding import own_part, sharding_of
from fsdp_sft.export.plan import Described, ExportPlan, plan_export, unsharded_twin
from fsdp_sft.export.settings import write_settings
from fsdp_sft.export.target import check_target, export_target, make_room, put_in_place, staged
from fsdp_sft.export.tensors import exported

_logger = logging.getLogger(__name__)
_PIECE_ELEMENTS = 4 << 20  # of rows, written at once


@answered
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
            is not lost because of a folder's name. Every rank writes its rows if all of them see rank 0's
            folder; if not, rank 0 writes everything.
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
    Memory: 4 Mi elements of a tensor on each rank. For tensors that are converted, or that are not sharded by
        rows, also: on rank 0 twice one full tensor or one group that is converted together, and on other
        ranks their own part of one tensor. All of it is CPU memory. A weight with adapters is at least
        float32 while they are merged.

    Example:
        >>> folder = fs.export_hf(model, "out", tokenizer=tokenizer)
        >>> from transformers import AutoModelForCausalLM
        >>> AutoModelForCausalLM.from_pretrained(folder).dtype
        torch.bfloat16
    """
    started = time.perf_counter()
    model = unwrapped(model)
    reshard(model)
    target = export_target(out_dir)
    merges, caching = adapted_layers(model), configs_without_caches(model)
    base: Any
    with without_adapters(model, trained=True) as base, staged(target) as temporary:
        with agreed(f"preparing to export to {target}"):
            content, plan, config = plan_export(base, merges, dtype, caching)
            if plan is not None:
                make_room(temporary, target, plan.num_bytes)
                write_settings(base, config, temporary, target.name, dtype, tokenizer, chat_template)
        plan = share(plan)
        files, gatherer = HfFiles(temporary, plan.written), Gatherer()
        try:
            if this_rank() == 0:
                gatherer.attempt(lambda: files.start(max_shard_size, base.num_parameters()))
            by_rows = _written_by_rows(content, plan, merges) if files.open_on_all() else set()
            for name in sorted(by_rows):
                tensor = content.tensors[plan.sources[name]]
                gatherer.attempt(partial(files.write_rows, plan.unchanged[name], tensor, plan.dtypes[name]))
            twin = unsharded_twin(base) if plan.converts and this_rank() == 0 else None
            others = [group for group in plan.groups if group[0] not in by_rows]
            for name, tensor in exported(content, plan, merges, twin, gatherer, others):
                gatherer.attempt(partial(files.write, name, tensor))
            gatherer.attempt(files.finish)
        finally:
            files.close()
        gatherer.finish(f"exporting to {target}")
        folder = put_in_place(temporary, target, overwrite=overwrite)
    tell(_logger, "exported in %.2f s: %s", time.perf_counter() - started, folder)
    return folder


def _written_by_rows(content: ModelTensors, plan: ExportPlan, merges: Mapping[str, Any]) -> set[str]:
    """Sources of which each rank writes its own rows: not converted, without adapters, sharded by rows."""
    return {
        name
        for name in plan.unchanged
        if plan.sources[name].rpartition(".")[0] not in merges
        and _has_whole_rows(content.tensors[plan.sources[name]])
    }


def _has_whole_rows(tensor: torch.Tensor) -> bool:
    """Whether each rank has whole rows of ``tensor``, which are contiguous; the same on all ranks."""
    parts = sharding_of(tensor).parts(tensor.shape)
    return all(box.shape[1:] == tuple(tensor.shape[1:]) for _, box in parts)


# The weight files and their index, which have their final size from the start.


class HfFiles:
    """Files that rank 0 makes, and into which the other ranks write their rows if they see them.

    Tensors can be written in any order.

    Args:
        folder: Folder of the export, the same on all ranks.
        written: Dtype and shape of every tensor, by name and in order.

    Memory: One piece of 4 Mi elements in CPU memory for rows.
    """

    def __init__(self, folder: Path, written: Described) -> None:
        self._folder, self._left = folder, dict(written)
        self._files: dict[str, int] = {}
        self._places: dict[str, tuple[str, int]] = {}  # file of each tensor, and the byte at which it begins

    def start(self, max_shard_size: int | str, num_parameters: int) -> None:
        """Make the files, and an index if there are several. Only rank 0 calls this.

        Args:
            max_shard_size: Largest size of one file, in bytes or as text such as ``"5GB"``.
            num_parameters: Number of the model's parameters, which goes into the index.
        """
        from huggingface_hub import split_state_dict_into_shards_factory

        split = split_state_dict_into_shards_factory(
            self._left,
            get_storage_size=lambda described: num_bytes(*described),
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        for file, names in split.filename_to_tensors.items():
            described = {name: self._left[name] for name in names}
            self._files[file], header, _ = create(self._folder / file, described, {"format": "pt"})
            self._places.update({name: (file, header.entries[name].start) for name in names})
        if split.is_sharded:
            metadata = {"total_parameters": num_parameters, **split.metadata}
            index = {"metadata": metadata, "weight_map": dict(split.tensor_to_filename)}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            write_bytes(self._folder / "model.safetensors.index.json", text.encode())

    def open_on_all(self) -> bool:
        """Open the files on the other ranks too; False if a rank does not see rank 0's folder.

        Collective: all ranks.
        """
        self._places = share(self._places)
        seen = bool(self._places)
        try:
            for file in sorted({file for file, _ in self._places.values()} - self._files.keys()):
                self._files[file] = os.open(self._folder / file, os.O_WRONLY | os.O_NOFOLLOW)
        except OSError:  # for instance a folder that only rank 0's machine has
            seen = False
        return all(all_gather_objects(seen))

    def write_rows(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Write this rank's rows of a tensor as ``dtype``, unless a replica writes them."""
        self._left.pop(name)
        box = own_part(tensor)
        if box is None:
            return
        file, start = self._places[name]
        if tensor.dim():
            start += box.offset[0] * math.prod(tensor.shape[1:]) * dtype.itemsize
        rows = values_of(tensor, dtype).reshape(-1)
        for first in range(0, box.numel, _PIECE_ELEMENTS):
            piece = rows[first : first + _PIECE_ELEMENTS].to("cpu", dtype).contiguous()
            write_early(self._files[file], start + first * dtype.itemsize, bytes_of(piece))

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
        file, start = self._places[name]
        contiguous = tensor.contiguous()
        write_at(self._files[file], start, bytes_of(contiguous))

    def finish(self) -> None:
        """Force what was written to the disk.

        Raises:
            RuntimeError: If rank 0 has not written a tensor.
        """
        if self._left and this_rank() == 0:
            raise RuntimeError(
                f"no tensor was converted to {sorted(self._left)[:4]}; please report the architecture"
            )
        for fd in self._files.values():
            force_to_disk(fd)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


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
        PermissionError: If this process may not write there.
        NotADirectoryError: If a part of the path is a file.
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
    found: Path = share(target)
    return found

"""Export to a Hugging Face folder with the contents that ``save_pretrained`` of an unsharded model writes."""

import logging
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
from fsdp_sft._ranks.agree import agreed, share, tell, this_rank
from fsdp_sft._tensors.gather import Gatherer
from fsdp_sft.export.hf_files import HfFiles, has_whole_rows
from fsdp_sft.export.plan import ExportPlan, unsharded_twin
from fsdp_sft.export.settings import write_settings
from fsdp_sft.export.target import check_target, export_target, make_room, put_in_place, staged
from fsdp_sft.export.tensors import exported, planned

_logger = logging.getLogger(__name__)


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
            content, plan, config = planned(base, merges, dtype, caching)
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
        and has_whole_rows(content.tensors[plan.sources[name]])
    }


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
        plan = planned(base, merges, torch.bfloat16)[1] if base is not None else None
        if this_rank() == 0:
            check_target(target, overwrite=overwrite, need=plan.num_bytes if plan is not None else 0)
    found: Path = share(target)
    return found

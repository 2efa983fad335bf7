"""Export to a Hugging Face folder with the contents that ``save_pretrained`` of an unsharded model writes."""

import json
import logging
import os
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.adapters import adapted_layers, without_adapters
from fsdp_sft._model.blocks import configs_without_caches
from fsdp_sft._model.sharded import reshard
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._process.words import answered
from fsdp_sft._ranks.agree import agreed, share, tell, this_rank
from fsdp_sft._tensors.disk import write_bytes, write_early
from fsdp_sft._tensors.gather import Gatherer
from fsdp_sft._tensors.safetensors import bytes_of, create, force_to_disk, num_bytes
from fsdp_sft.export.plan import Described, plan_export, unsharded_twin
from fsdp_sft.export.settings import write_settings
from fsdp_sft.export.target import check_target, export_target, make_room, put_in_place, staged
from fsdp_sft.export.tensors import exported

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
    target = export_target(out_dir)
    merges, caching = adapted_layers(model), configs_without_caches(model)
    base: Any
    with without_adapters(model, trained=True) as base, staged(target) as temporary, ExitStack() as opened:
        files: WeightFiles | None = None
        with agreed(f"preparing to export to {target}"):
            content, plan, config = plan_export(base, merges, dtype, caching)
            if plan is not None:
                make_room(temporary, target, plan.num_bytes)
                write_settings(base, config, temporary, target.name, dtype, tokenizer, chat_template)
                parameters = base.num_parameters()
                files = WeightFiles(temporary, plan.written, max_shard_size, parameters, opened)
        plan, gatherer = share(plan), Gatherer()
        twin = unsharded_twin(base) if plan.converts and files is not None else None
        for name, tensor in exported(content, plan, merges, twin, gatherer):
            if files is not None:
                gatherer.attempt(partial(files.write, name, tensor))
        if files is not None:
            gatherer.attempt(files.finish)
        gatherer.finish(f"exporting to {target}")
        folder = put_in_place(temporary, target, overwrite=overwrite)
    tell(_logger, "exported in %.2f s: %s", time.perf_counter() - started, folder)
    return folder


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
            described = {name: written[name] for name in names}
            fd, header, _ = create(folder / file, described, {"format": "pt"})
            opened.callback(os.close, fd)
            self._places.update({name: (fd, header.entries[name].start) for name in names})
        if split.is_sharded:
            metadata = {"total_parameters": num_parameters, **split.metadata}
            index = {"metadata": metadata, "weight_map": dict(split.tensor_to_filename)}
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
    return target

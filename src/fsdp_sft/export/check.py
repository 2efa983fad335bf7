"""A check before training that the export after it can be written and read."""

import os
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from fsdp_sft._model.adapters import adapted_layers, without_adapters
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._ranks.agree import agreed, share, this_rank
from fsdp_sft.export.merged import refuse_unmergeable
from fsdp_sft.export.plan import exportable, plan_export
from fsdp_sft.export.target import check_target, export_target


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
        need = 0
        if base is not None:
            content = exportable(base, torch.bfloat16)
            refuse_unmergeable(content, merges)
            if this_rank() == 0:
                need = plan_export(base, content, torch.bfloat16)[0].num_bytes
        if this_rank() == 0:
            check_target(target, overwrite=overwrite, need=need)
    found: Path = share(target)
    return found

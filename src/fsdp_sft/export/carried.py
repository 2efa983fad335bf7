"""What an export copies from its base checkpoint: processor files and custom code."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from fsdp_sft._compat.models import original_class
from fsdp_sft._process.callers import warn_caller
from fsdp_sft.errors import CheckpointFormatError
from fsdp_sft.weights.hub import PROCESSOR_FILES
from fsdp_sft.weights.resolve import resolved_inside

_OF_A_CHECKPOINT = "transformers_modules"  # the package in which transformers imports code of checkpoints


def carry_code(model: Any, config: Any, folder: Path) -> None:
    """Copy the checkpoint's custom code, and remove from ``auto_map`` the entries whose code is missing.

    Such an entry would make loading with ``trust_remote_code=True`` fail although transformers has the class.

    Args:
        model: A transformers model.
        config: Config of the export, which is changed.
        folder: Folder of the export.
    """
    from transformers.dynamic_module_utils import get_relative_import_files

    for cls in (original_class(model), type(config)):
        if cls.__module__.split(".")[0] == _OF_A_CHECKPOINT:
            code = str(sys.modules[cls.__module__].__file__)
            for file in (code, *get_relative_import_files(code)):
                shutil.copyfile(file, folder / Path(file).name)
    if getattr(config, "auto_map", None):
        entries = {name: _reference(entry, folder) for name, entry in config.auto_map.items()}
        config.auto_map = {name: entry for name, entry in entries.items() if entry is not None}


def _reference(entry: Any, folder: Path) -> Any:
    """An entry of an ``auto_map``, pointed to the copied code if there is any; None if code is missing."""
    if isinstance(entry, (list, tuple)):
        parts = [part and _reference(part, folder) for part in entry]
        return parts if any(parts) else None
    repository, _, within = str(entry).rpartition("--")
    if (folder / f"{within.partition('.')[0]}.py").is_file():
        return within
    return entry if repository else None  # in a repository on the Hub


def carry_processor(config: Any, folder: Path) -> None:
    """Copy the model's processor files, unless the export has them already.

    Args:
        config: Config of the model.
        folder: Folder of the export.
    """
    name = str(getattr(config, "name_or_path", "") or "")
    own = _cached(name, "config.json")
    # A text model taken out of a multimodal checkpoint needs no processor.
    if own is None or json.loads(own.read_text()).get("model_type") != config.model_type:
        return
    for file in PROCESSOR_FILES:
        source = _cached(name, file)
        if source is not None and not (folder / file).exists():
            shutil.copyfile(source, folder / file)


def _cached(name: str, file: str) -> Path | None:
    """A file of a folder, or of a Hub repository's cache; None if there is none. Nothing is downloaded."""
    if not name:
        return None
    if Path(name).is_dir():
        if not (Path(name) / file).is_file():
            return None
        try:
            return resolved_inside(Path(name), file)
        except CheckpointFormatError as error:  # no reason to end a training without its export
            warn_caller(f"{error}; it is not copied into the export")
            return None
    try:
        cached = try_to_load_from_cache(name, file)
    except ValueError:  # no name of a repository
        return None
    return Path(cached) if isinstance(cached, str) else None

"""What a folder says of how it is quantised, carried into one in which more of its modules are in 16 bits."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_sft._quantised.find import METHODS
from fsdp_sft._quantised.settings import (
    CONFIG,
    OTHER_FILES,
    Settings,
    is_config,
    read_settings,
    settings_keys,
)
from fsdp_sft._tensors.disk import write_bytes


def names_skips(settings: Settings) -> bool:
    """Whether the config of such a checkpoint can say that further modules are in 16 bits."""
    return bool(METHODS[settings.method].skips)


def carry_settings(settings: Settings, source: Path, target: Path, modules: Sequence[str]) -> None:
    """Write how ``source`` is quantised into the config of ``target``, and the files that say it as well.

    Args:
        settings: What ``source`` says.
        source: Folder of the checkpoint.
        target: Folder with a ``config.json``.
        modules: Names of the modules that are quantised in ``source`` and are not in ``target``.
    """
    skips = METHODS[settings.method].skips
    config = read_settings(target / CONFIG)
    _put(read_settings(source / CONFIG), config, skips[:1], skips, modules)
    _write(target / CONFIG, config)
    for name in OTHER_FILES:
        if (source / name).is_file():
            fields = read_settings(source / name)
            inner = fields.get("quantization", fields)
            if isinstance(inner, dict):
                inner |= _skipping(inner, skips[-1:], skips, modules)
            _write(target / name, fields)


def _put(
    source: Mapping[str, Any],
    target: dict[str, Any],
    first: Sequence[str],
    skips: Sequence[str],
    modules: Sequence[str],
) -> None:
    """Copy the settings of a config, and of the configs within it, to the same places."""
    for key in settings_keys(source):
        target[key] = {**source[key], **_skipping(source[key], first, skips, modules)}
    for name, value in source.items():
        if is_config(name, value) and isinstance(value, dict) and isinstance(target.get(name), dict):
            _put(value, target[name], first, skips, modules)


def _skipping(
    fields: Mapping[str, Any], first: Sequence[str], skips: Sequence[str], modules: Sequence[str]
) -> dict[str, Any]:
    """The lists of modules in 16 bits, with further ones."""
    there = [name for name in skips if isinstance(fields.get(name), list)] or first
    known = {name: fields.get(name) or [] for name in there}
    longer = {name: [*own, *(m for m in modules if m not in own)] for name, own in known.items()}
    return longer if modules else {}


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    path.unlink(missing_ok=True)
    write_bytes(path, (json.dumps(fields, indent=2) + "\n").encode())

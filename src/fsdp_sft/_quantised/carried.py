"""What a folder says of how it is quantised, carried into one in which more of its modules are in 16 bits."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def carry_settings(
    settings: Settings, source: Path, target: Path, modules: Sequence[str], others: Sequence[str]
) -> None:
    """Write how ``source`` is quantised into the config of ``target``, and the files that say it as well.

    Args:
        settings: What ``source`` says.
        source: Folder of the checkpoint.
        target: Folder with a ``config.json``.
        modules: Names of the modules that are quantised in ``source`` and are not in ``target``.
        others: Names of the modules that are quantised in neither.
    """
    lists = _Lists(METHODS[settings.method].skips, modules, others)
    config = read_settings(target / CONFIG)
    _put(read_settings(source / CONFIG), config, lists)
    _write(target / CONFIG, config)
    for name in OTHER_FILES:
        if (source / name).is_file():
            fields = read_settings(source / name)
            inner = fields.get("quantization", fields)
            if isinstance(inner, dict):
                inner |= lists.longer(inner, lists.fields[-1:])
            _write(target / name, fields)


@dataclass(frozen=True)
class _Lists:
    """The lists of modules in 16 bits, and what is added to them."""

    fields: Sequence[str]
    modules: Sequence[str]
    others: Sequence[str]

    def longer(self, settings: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
        """The lists with further modules; a new one, under the name ``first``, if there is none.

        Without a list readers leave out a head, for instance, by themselves, and with one they do not
        (transformers, ``get_modules_to_not_convert``): so a new one begins with all that is in 16 bits.
        """
        if not self.modules:
            return {}
        there = [name for name in self.fields if isinstance(settings.get(name), list)]
        known = {name: settings[name] for name in there} or {name: list(self.others) for name in first}
        return {name: [*own, *(m for m in self.modules if m not in own)] for name, own in known.items()}


def _put(source: Mapping[str, Any], target: dict[str, Any], lists: _Lists) -> None:
    """Copy the settings of a config, and of the configs within it, to the same places."""
    for key in settings_keys(source):
        target[key] = {**source[key], **lists.longer(source[key], lists.fields[:1])}
    for name, value in source.items():
        if is_config(name, value) and isinstance(value, dict) and isinstance(target.get(name), dict):
            _put(value, target[name], lists)


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    path.unlink(missing_ok=True)
    write_bytes(path, (json.dumps(fields, indent=2) + "\n").encode())

"""What a checkpoint's folder says of how it is quantised."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_sft._process.bounds import MAX_SETTINGS_BYTES, parse_json
from fsdp_sft._tensors.disk import read_bytes
from fsdp_sft.errors import CheckpointCorruptError, CheckpointFormatError, abridged

IN_16_BITS = "take the model's checkpoint in 16 bits, or write one with the tool that quantised this one"
CONFIG = "config.json"
# Files of their own in which tools say it, when the config does not.
OTHER_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
_KEYS = ("quantization_config", "compression_config")  # the second of compressed-tensors' first releases
_MAX_BLOCK = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How a checkpoint is quantised, according to its folder; what is remembered of a model built from it.

    Attributes:
        folder: The folder, for messages.
        method: ``quant_method``, such as ``"fp8"``.
        fields: All that the folder says of it; not trusted.
    """

    folder: str
    method: str
    fields: Mapping[str, Any]

    def refused(self, why: str) -> CheckpointFormatError:
        """The error that says why it cannot be read."""
        advice = "" if IN_16_BITS in why else f"; if a new download has the same, {IN_16_BITS}"
        return CheckpointFormatError(f"{self.folder} is quantised ({self.method}): {why}{advice}")

    def one_of(self, field: str, known: tuple[Any, ...], otherwise: Any = None) -> Any:
        """A field whose value must be among ``known``; ``otherwise`` if it is not there.

        Raises:
            CheckpointFormatError: If it has another value.
        """
        value = self.fields.get(field)
        value = otherwise if value is None else value
        value = value.lower() if isinstance(value, str) else value
        if not any(value == other and type(value) is type(other) for other in known):
            raise self.refused(
                f"{field}={value!r:.80} is not among those that are read ({abridged(map(str, known))}): "
                f"{IN_16_BITS}"
            )
        return value

    def block(self, value: Any, what: str) -> int:
        """A number of rows or columns that share a scale.

        Raises:
            CheckpointFormatError: If it is none.
        """
        if type(value) is not int or not 0 < value <= _MAX_BLOCK:
            raise self.refused(f"{what}={value!r:.80} is no number of values that share a scale")
        return value


def settings_of(name: str | Path, config: Any = None) -> Settings | None:
    """How a checkpoint is quantised; None if nothing says that it is.

    Args:
        name: Its folder; with a config also another name, for messages.
        config: Its config as transformers has read it, or the fields; None reads them in the folder.

    Raises:
        CheckpointFormatError: If two parts of the config say different things, or a file is not JSON.
    """
    found = list(settings_in(read_settings(Path(name, CONFIG)) if config is None else config))
    for file, method in OTHER_FILES.items():
        if not found and name and (fields := read_settings(Path(name, file))):
            inner = fields.get("quantization", fields)
            found = [{"quant_method": method, **(inner if isinstance(inner, dict) else {})}]
    if not found:
        return None
    if any(other != found[0] for other in found[1:]):
        raise CheckpointFormatError(f"{name} is quantised in two ways, by the parts of its config")
    stated = found[0].get("quant_method")
    stated = getattr(stated, "value", stated)
    if stated is None and "modelopt" in str(found[0].get("producer", "")):
        stated = "modelopt"
    return Settings(str(name), str(stated or "of a format without quant_method")[:80], found[0])


def settings_in(config: Any) -> Iterator[dict[str, Any]]:
    """The quantisation settings of a config and of the configs within it, as mappings."""
    own = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    for value in (own[key] for key in _KEYS if own.get(key) is not None):
        yield value if isinstance(value, dict) else value.to_dict() if hasattr(value, "to_dict") else {}
    for name, value in own.items():
        if is_config(name, value):
            yield from settings_in(value)


def without_settings(config: Any) -> None:
    """Take the quantisation settings out of a config and the configs within it."""
    own = config if isinstance(config, dict) else config.__dict__
    for key in _KEYS:
        own.pop(key, None)
    for name, value in own.items():
        if is_config(name, value):
            without_settings(value)


def is_config(name: Any, value: Any) -> bool:
    """Whether a field of a config is a config within it, by its name and value."""
    is_one = isinstance(value, dict) or hasattr(value, "to_dict")
    return str(name).endswith("_config") and name not in _KEYS and is_one


def read_settings(path: Path, most: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """The fields of a JSON file beside the weights; none if there is no such file.

    Raises:
        CheckpointFormatError: If it is not JSON, or has more than ``most`` bytes.
    """
    if not os.path.lexists(path):
        return {}
    try:
        fields = parse_json(read_bytes(path.resolve(), most), path.name)  # in the Hub's cache it is a link
    except (CheckpointCorruptError, ValueError) as error:
        raise CheckpointFormatError(f"{path} cannot be read: {error}") from None
    return fields if isinstance(fields, dict) else {}

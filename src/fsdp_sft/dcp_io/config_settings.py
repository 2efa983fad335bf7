"""A step's record of its model's config, by which a resume of a model that computes otherwise is told."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._process.codec import MALFORMED, dumps, loads
from fsdp_sft._tensors.disk import read_bytes
from fsdp_sft.dcp_io.manifest import MAX_JSON_BYTES, Manifest
from fsdp_sft.errors import CheckpointCorruptError, abridged

NAME = "config.json"  # below settings/
# Fields that say where a model is from or how it is run, and not what it computes in training.
_NOT_OF_THE_MODEL = re.compile(
    r"(.*\.)?(_.*|name_or_path|transformers_version|architectures|auto_map|dtype|torch_dtype|use_cache"
    r"|output_\w+|return_dict|attn_implementation|experts_implementation|gradient_checkpointing)(\..*)?"
)


def config_settings(model: nn.Module) -> dict[str, bytes]:
    """Content of ``config.json``, by the file's name; empty if the model has no config of transformers."""
    fields = _fields(model)
    return {NAME: dumps(fields)} if fields else {}


def change_of_config(folder: Path, manifest: Manifest, model: nn.Module) -> str:
    """The fields in which a model's config differs from that of a step, in words; "" if there is none.

    Raises:
        CheckpointCorruptError: If the file is not what was written.
    """
    own = _fields(model)
    if not own or f"settings/{NAME}" not in manifest.files:  # of another kind of model, or an earlier version
        return ""
    path = folder / "settings" / NAME
    try:
        saved = dict(loads(read_bytes(path, MAX_JSON_BYTES), NAME))
    except MALFORMED as error:
        raise CheckpointCorruptError(f"{path} is not what was written: {error}") from None
    apart = [
        f"{name} was {saved.get(name)!r:.80} and is {own.get(name)!r:.80}"
        for name in sorted({*saved, *own})
        if repr(saved.get(name)) != repr(own.get(name))  # also of NaN, which differs from itself
    ]
    if not apart:
        return ""
    return (
        f"the model's config is not that of the step: {abridged(apart, '; ')}. Its weights were trained for "
        "the former: build the model with it, unless the change is meant (build_meta_model takes fields)"
    )


def _fields(model: nn.Module) -> dict[str, Any]:
    """The fields of a config that say what the model computes, by their paths, as JSON values."""
    config: Any = getattr(unwrapped(model), "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    plain = json.loads(json.dumps(config.to_dict(), default=lambda value: type(value).__name__))
    return {name: value for name, value in _flat(plain, "") if not _NOT_OF_THE_MODEL.fullmatch(name)}


def _flat(fields: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The values of nested dicts, by their paths with points between."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

"""A model's config, or its tokenizer, by the name of a folder or of a model on the Hub."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_sft._compat.attention import attention_asked_for
from fsdp_sft._process.bounds import MAX_LABELS, MAX_LAYERS, MAX_SETTINGS_BYTES
from fsdp_sft._process.limits import blame_no_file
from fsdp_sft.errors import CheckpointFormatError, CheckpointNotFoundError, FsdpSftError

_SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model")  # of which configs and tokenizers are read
# Names of weight files in other formats, and what to do with them.
_OTHER_FORMATS = {
    re.compile(r"gguf", re.IGNORECASE): "GGUF, the format of llama.cpp, is not read: take the model's "
    "checkpoint in 16 bits, from which it was made",
    re.compile(r"^consolidated"): "consolidated files are in the format of their maker (Mistral, Meta), with "
    "other names and rotary rows in another order: put the repository's model*.safetensors beside them",
    re.compile(
        r"^(shard-\d+-model-.*|sharded$)"
    ): "torch's HuggingFaceStorageWriter wrote a file for each rank: "
    "read them once into the state_dict() of a whole model, torch.distributed.checkpoint.load(state, "
    "storage_reader=HuggingFaceStorageReader(folder), no_dist=True), and call its save_pretrained",
}
# Fields of a config that say of how many parts a model is built, each in time of its own.
_COUNTS = {re.compile(r"(layers?|blocks)$"): MAX_LAYERS, re.compile(r"(experts|labels)$"): MAX_LABELS}


def config_of(name: str | os.PathLike[str]) -> Any:
    """The transformers config of a folder or a Hub id.

    Raises:
        CheckpointNotFoundError: If there is no such folder, and the Hub does not give it.
    """
    config = _named(name, partial(auto_config, trust_remote_code=False), "config")
    refuse_kernels(os.fspath(name), config)
    return config


def auto_config(name: str, *, kind: str | None = None, **options: Any) -> Any:
    """What ``AutoConfig.from_pretrained`` returns, after the config's numbers have been looked at.

    Args:
        name: A folder or a Hub id.
        kind: Type of model to read the config as, in place of the one that it names.
        options: Keywords of ``AutoConfig.from_pretrained``.

    Raises:
        CheckpointFormatError: If it claims more layers than a model has: transformers builds lists of them.
            If transformers does not know ``kind``.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    revision: Any = options.get("revision")
    _check_counts(PreTrainedConfig.get_config_dict(name, revision=revision)[0], name)
    if kind is None:
        return AutoConfig.from_pretrained(name, **options)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise CheckpointFormatError(f"transformers knows no models of type {kind!r}, as which to read {name}")
    return CONFIG_MAPPING[kind].from_pretrained(name, revision=revision, model_type=kind)


def check_settings(folder: Path) -> None:
    """Refuse settings that are no regular files, or too large: others would wait for a pipe, or read on.

    Raises:
        CheckpointFormatError: If there is such a file.
    """
    for path in (path for pattern in _SETTINGS for path in folder.glob(pattern)):
        if path.is_dir() or not path.exists():  # of a link to nothing: whoever needs the file will say so
            continue
        if not path.is_file():
            raise CheckpointFormatError(f"{path} is not a regular file")
        if path.stat().st_size > MAX_SETTINGS_BYTES and not path.name.endswith(".index.json"):
            raise CheckpointFormatError(f"{path} has more than {MAX_SETTINGS_BYTES} bytes")


@contextmanager
def read_by_transformers(name: str, what: str) -> Iterator[None]:
    """Turn what transformers raises for a field that it does not understand into an error about the folder.

    Raises:
        CheckpointFormatError: Instead of any error but this library's own and those that no file has caused,
            such as a package that is missing.
    """
    try:
        yield
    except (FsdpSftError, ImportError):
        raise
    except Exception as error:
        blame_no_file(error, name)
        raise CheckpointFormatError(
            f"transformers does not read the {what} of {name}: {type(error).__name__}: {error!s:.800}"
            f"{told_of_format(Path(name))}"
        ) from error


def told_of_format(folder: Path) -> str:
    """Advice, for the end of an error, on a folder whose weights are in a format that is not read."""
    names = [str(folder), *(path.name for path in folder.glob("*"))]
    return next((f"; {told}" for form, told in _OTHER_FORMATS.items() if any(map(form.search, names))), "")


def refuse_kernels(name: str, config: Any) -> None:
    """Refuse a config whose attention is a repository of the Hub, whose code transformers would run.

    Raises:
        CheckpointFormatError: If it is one.
    """
    asked = attention_asked_for(config)
    if isinstance(asked, str) and "/" in asked:
        raise CheckpointFormatError(
            f"the config of {name} asks for the attention {asked!r}, native code that would be fetched "
            "and run; pass attn_implementation= with a name that you trust, this one or 'sdpa'"
        )
    for part in getattr(config, "sub_configs", ()):
        refuse_kernels(name, getattr(config, part, None))


def tokenizer_of(name: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder or a Hub id.

    Raises:
        CheckpointNotFoundError: If there is no such folder, and the Hub does not give it.
    """
    from transformers import AutoTokenizer

    return _named(name, partial(AutoTokenizer.from_pretrained, trust_remote_code=False), "tokenizer")


def _check_counts(fields: Any, name: str) -> None:
    """Refuse numbers of layers and the like that no model has, in a config and in those inside it."""
    for key, value in fields.items() if isinstance(fields, dict) else ():
        most = next((most for pattern, most in _COUNTS.items() if pattern.search(str(key))), None)
        if most is not None and isinstance(value, int) and value > most:
            raise CheckpointFormatError(f"the config of {name} has {key}={value!s:.50}, more than {most}")
        _check_counts(value, name)


def _named(name: str | os.PathLike[str], load: Callable[[str], Any], what: str) -> Any:
    path = os.path.expanduser(name)
    if Path(path).is_dir():
        check_settings(Path(path))
        with read_by_transformers(path, what):
            return load(path)
    try:
        return load(path)
    except FsdpSftError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"there is no folder {path!r}, and no such model could be had from the Hub: "
            + str(error).strip().partition("\n")[0]
        ) from error

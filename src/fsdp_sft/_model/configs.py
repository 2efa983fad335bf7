"""A model's config, or its tokenizer, by the name of a folder or of a model on the Hub."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_sft._compat.attention import attention_asked_for
from fsdp_sft.errors import CheckpointFormatError, CheckpointNotFoundError


def config_of(name: str | os.PathLike[str]) -> Any:
    """The transformers config of a folder or a Hub id.

    Raises:
        CheckpointNotFoundError: If there is no such folder, and the Hub does not give it.
    """
    from transformers import AutoConfig

    config = _named(name, partial(AutoConfig.from_pretrained, trust_remote_code=False))
    refuse_kernels(os.fspath(name), config)
    return config


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

    return _named(name, partial(AutoTokenizer.from_pretrained, trust_remote_code=False))


def _named(name: str | os.PathLike[str], load: Callable[[str], Any]) -> Any:
    path = os.path.expanduser(name)
    if Path(path).is_dir():
        return load(path)
    try:
        return load(path)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointNotFoundError(
            f"there is no folder {path!r}, and no such model could be had from the Hub: {first}"
        ) from error

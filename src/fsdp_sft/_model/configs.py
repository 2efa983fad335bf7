"""A model's config, or its tokenizer, by the name of a folder or of a model on the Hub."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_sft.errors import CheckpointNotFoundError


def config_of(name: str | os.PathLike[str]) -> Any:
    """The transformers config of a folder or a Hub id.

    Raises:
        CheckpointNotFoundError: If there is no such folder, and the Hub does not give it.
    """
    from transformers import AutoConfig

    return _named(name, AutoConfig.from_pretrained)


def tokenizer_of(name: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder or a Hub id.

    Raises:
        CheckpointNotFoundError: If there is no such folder, and the Hub does not give it.
    """
    from transformers import AutoTokenizer

    return _named(name, AutoTokenizer.from_pretrained)


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

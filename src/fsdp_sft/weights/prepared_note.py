"""The note that marks a folder as a prepared base, and says how it was made."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_sft._process.bounds import MAX_JSON_BYTES, parse_json
from fsdp_sft._process.codec import MALFORMED, dumps
from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.disk import read_bytes
from fsdp_sft.errors import CheckpointCorruptError, CheckpointMismatchError

FORMAT_VERSION = 2
NOTE_NAME = "prepared.json"  # below settings/


@dataclass(frozen=True)
class PreparedBase:
    """What ``prepare_base`` records of a model besides its tensors.

    Attributes:
        folder: The prepared folder.
        name: Folder or Hub id that was prepared.
        dtype: Dtype of its parameters, except those that the class keeps in float32.
        source_keys: Names in the checkpoint that was prepared, which show the conversions that an export has
            to reverse.
    """

    folder: Path
    name: str
    dtype: torch.dtype
    source_keys: list[str]

    @property
    def settings(self) -> Path:
        """The folder of the model's config."""
        return self.folder / "settings"

    def note(self) -> bytes:
        """Content of the note, which ``prepared_at`` reads."""
        dtype = str(self.dtype).removeprefix("torch.")
        return dumps(
            {"version": FORMAT_VERSION, "name": self.name, "dtype": dtype, "source_keys": self.source_keys}
        )


def prepared_at(folder: Path) -> PreparedBase | None:
    """The prepared base in a folder; None if there is none.

    Raises:
        CheckpointCorruptError: If its note is damaged.
        CheckpointMismatchError: If another version of this library made it.
    """
    path = folder / "settings" / NOTE_NAME
    try:
        if not path.exists():
            return None
        about = parse_json(read_bytes(path, MAX_JSON_BYTES), NOTE_NAME)
        version = about["version"]
        base = PreparedBase(folder, about["name"], getattr(torch, about["dtype"]), about["source_keys"])
        if not isinstance(base.name, str) or not isinstance(base.source_keys, list):
            raise TypeError("it does not say what was prepared")
        if not isinstance(base.dtype, torch.dtype):
            raise TypeError(f"{about['dtype']!r} is no dtype of torch")
    except (OSError, CheckpointCorruptError, *MALFORMED) as error:
        blame_no_file(error, path)
        raise CheckpointCorruptError(
            f"{path} cannot be read: {error}; delete {folder} and call prepare_base again"
        ) from None
    if version != FORMAT_VERSION:
        raise CheckpointMismatchError(
            f"{folder} was prepared in format {version}, and this version reads {FORMAT_VERSION}; call "
            "prepare_base again"
        )
    return base

"""From a folder or a Hub id to the files of one checkpoint, on every rank the same."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from fsdp_sft._safetensors import Header, SafetensorsError, TensorEntry, open_file, read_header
from fsdp_sft.weights.errors import CheckpointFormatError, abridged

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MAX_INDEX_BYTES = 1 << 28


@dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint.

    Attributes:
        file: Index into ``Checkpoint.files``.
        entry: Its dtype, shape and place in the file.
    """

    file: int
    entry: TensorEntry


@dataclass(frozen=True)
class Checkpoint:
    """The files of a checkpoint with their headers read and checked.

    Attributes:
        folder: Where they are.
        files: Paths with every symbolic link resolved.
        file_bytes: Their sizes when the headers were read.
        sources: Name in the checkpoint to tensor.
    """

    folder: Path
    files: list[Path]
    file_bytes: list[int]
    sources: dict[str, Source]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(source.entry.num_bytes for source in self.sources.values())


def weight_file_names(folder: Path, variant: str | None = None) -> list[str]:
    """Names of the files that hold a checkpoint's tensors; nothing else in the folder is looked at.

    As transformers does, a single file is preferred to an index.

    Args:
        folder: Of the checkpoint.
        variant: Such as ``"fp16"``, the middle of ``model.fp16.safetensors``.

    Raises:
        CheckpointFormatError: If there is neither, the index is not one, or it names a file outside.
    """
    single, index = with_variant(SINGLE, variant), with_variant(INDEX, variant)
    if (folder / single).exists():
        return [single]
    if (folder / index).exists():
        return sorted(set(read_index(folder / index).values()))
    pickled = [name for name in _PICKLES if (folder / with_variant(name, variant)).exists()]
    if pickled:
        raise CheckpointFormatError(
            f"{folder} holds only pickled weights ({pickled[0]}), which can run code when they are opened. "
            "Convert them once: AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
        )
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    raise CheckpointFormatError(f"{folder} has neither {single} nor {index}; it has {abridged(present)}")


def with_variant(name: str, variant: str | None) -> str:
    """A file name with the variant before its ending, as transformers writes it."""
    if variant is None:
        return name
    if not variant or any(character in variant for character in "/\\"):
        raise ValueError(f"variant must be a plain word such as 'fp16', got {variant!r}")
    stem, ending = name.rsplit(".", 1)
    return f"{stem}.{variant}.{ending}"


def read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name from an index file, with every name checked.

    Raises:
        CheckpointFormatError: If it is not an index, or names a file that is not beside it.
    """
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {_MAX_INDEX_BYTES} bytes")
        weight_map = json.loads(path.read_text())["weight_map"]
        texts = isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values())
        if not texts or not weight_map:
            raise ValueError("weight_map is not an object of file names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointFormatError(f"{path} is not a safetensors index: {error!r}") from None
    for name in set(weight_map.values()):
        check_inside(name, path)
    return {str(key): str(name) for key, name in weight_map.items()}


def check_inside(name: str, index: Path) -> None:
    """Refuse a file name that could lead out of the checkpoint's folder.

    Raises:
        CheckpointFormatError: If it is absolute, climbs, or does not end in ``.safetensors``.
    """
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ":" in name or any(part in ("", ".", "..") for part in parts):
        raise CheckpointFormatError(f"{index} names {name!r}, which leads out of its folder")
    if not name.endswith(".safetensors"):
        raise CheckpointFormatError(f"{index} names {name!r}, which is not a .safetensors file")


def open_checkpoint(folder: Path, variant: str | None = None) -> Checkpoint:
    """Read and check every header of a checkpoint in a folder.

    Args:
        folder: A checkpoint's own folder, or a snapshot in the Hub's cache.
        variant: See ``weight_file_names``.

    Raises:
        CheckpointFormatError: If a file is missing, damaged or outside, or the index names a tensor that its
            file does not have.
    """
    names = weight_file_names(folder, variant)
    files = [resolved_inside(folder, name) for name in names]
    headers = [_header(path) for path in files]
    sources: dict[str, Source] = {}
    for number, header in enumerate(headers):
        for key, entry in header.entries.items():
            sources.setdefault(key, Source(number, entry))
    index = folder / with_variant(INDEX, variant)
    if names != [with_variant(SINGLE, variant)] and index.exists():
        for key, name in read_index(index).items():
            number = names.index(name)
            if key not in headers[number].entries:
                raise CheckpointFormatError(f"{index} says that {key!r} is in {name}, which does not have it")
            sources[key] = Source(number, headers[number].entries[key])
    return Checkpoint(folder, files, [header.file_bytes for header in headers], sources)


def resolved_inside(folder: Path, name: str) -> Path:
    """The regular file behind a name, which must lie in the folder or in the Hub cache that it belongs to.

    Raises:
        CheckpointFormatError: If it is missing or its links lead elsewhere.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointFormatError(
            f"{path} cannot be opened: {error}; is the checkpoint complete?"
        ) from None
    # The Hub's cache keeps <repo>/snapshots/<commit>/<name> as links to <repo>/blobs/<hash>.
    roots = [folder.resolve()]
    roots += [parent.parent / "blobs" for parent in roots[0].parents if parent.name == "snapshots"]
    if not any(real.is_relative_to(root) for root in roots):
        raise CheckpointFormatError(f"{path} is a link that leads out of its folder, to {real}")
    return real


def _header(path: Path) -> Header:
    try:
        fd = open_file(path)
    except (OSError, SafetensorsError) as error:
        raise CheckpointFormatError(f"{path} cannot be opened: {error}") from None
    try:
        return read_header(fd)
    except SafetensorsError as error:
        raise CheckpointFormatError(f"{path} is damaged: {error}; download it again") from None
    finally:
        os.close(fd)

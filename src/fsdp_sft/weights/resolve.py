"""From a folder or a Hub id to the tensors of a checkpoint: its weight files and all of their headers."""

import glob
import os
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp_sft._model.configs import told_of_format
from fsdp_sft._process.bounds import MAX_INDEX_BYTES
from fsdp_sft._quantised.find import check, published
from fsdp_sft._quantised.settings import CONFIG, OTHER_FILES, read_settings, settings_of
from fsdp_sft._ranks.agree import agreed, all_gather_objects, share, this_rank, while_others_wait
from fsdp_sft._tensors.stored import InFile, Stored, file_header
from fsdp_sft.errors import CheckpointFormatError, abridged

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
# Read by AutoProcessor, AutoImageProcessor and AutoVideoProcessor; an export copies them.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_CONFIG_FILES = [CONFIG, "generation_config.json", ADAPTER, *OTHER_FILES, *PROCESSOR_FILES]


def read_index(folder: Path) -> dict[str, str]:
    """File name by tensor name, of a checkpoint in several files; empty if it is in one.

    As in transformers, a single file is preferred to an index.

    Raises:
        CheckpointFormatError: If there are no weights in safetensors, if the index is none, or if an adapter
            of peft lies there too, which ``from_pretrained`` would apply.
    """
    if (folder / ADAPTER).is_file():
        raise CheckpointFormatError(
            f"{folder} has an adapter, which would be left out: merge it once, PeftModel.from_pretrained("
            f"base, folder).merge_and_unload().save_pretrained(out), and load that; or move {ADAPTER} and "
            "adapter_model.safetensors into a folder of their own"
        )
    if (folder / SINGLE).exists():
        return {}
    path = folder / INDEX
    if not path.exists():
        present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        raise CheckpointFormatError(
            f"{folder} has neither {SINGLE} nor {INDEX}; it has {abridged(present)}. Pickled weights "
            "(pytorch_model.bin) are converted once, on a machine with memory for the model: "
            "AutoModelForCausalLM.from_pretrained(folder, dtype='auto').save_pretrained(out) of transformers "
            f"and the same for AutoTokenizer{told_of_format(folder)}"
        )
    weight_map: Any = read_settings(path, MAX_INDEX_BYTES).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise CheckpointFormatError(f"{path} is not an index of weight files: it names none in weight_map")
    return dict(weight_map)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, whose headers are read once, when they are first needed.

    Attributes:
        name: Its own folder, or a snapshot in the Hub's cache. Of the name of a Hub id nothing is read.
    """

    name: str

    @cached_property
    def stored(self) -> dict[str, Stored]:
        """What ``open_checkpoint`` returns."""
        return open_checkpoint(Path(self.name))


def open_checkpoint(folder: Path) -> dict[str, Stored]:
    """Read and check all headers of a checkpoint's files.

    Args:
        folder: A checkpoint's own folder, or a snapshot in the Hub's cache.

    Returns:
        Tensors by the names under which they are published. Of a quantised checkpoint these are the values
        that its packed tensors and their scales hold.

    Raises:
        CheckpointFormatError: If a file is missing, damaged or outside the folder, or the index assigns a
            tensor to a file that does not have it; and if it is quantised in a way that is not read, or
            packed weights and scales do not belong together.
    """
    weight_map = read_index(folder)
    files = {
        name: resolved_inside(folder, name, by_links=True)
        for name in sorted(set(weight_map.values())) or [SINGLE]
    }
    headers = {
        path: file_header(path, CheckpointFormatError, "; if it is damaged, download it again")
        for path in dict.fromkeys(files.values())  # many names may be links to one file
    }
    stored = {key: InFile(path, e) for path in files.values() for key, e in headers[path].entries.items()}
    for key, name in weight_map.items():
        path = files[name]
        if key not in headers[path].entries:
            raise CheckpointFormatError(
                f"{folder / INDEX} says that {key!r} is in {name}, which does not have it"
            )
        stored[key] = InFile(path, headers[path].entries[key])
    settings = settings_of(folder)
    return {**stored} if settings is None else published(stored, settings)


def resolved_inside(folder: Path, name: str, *, by_links: bool = False) -> Path:
    """The file behind a name, with links resolved: in the folder, or in the Hub cache that it belongs to.

    Args:
        folder: A checkpoint's own folder, or a snapshot in the Hub's cache.
        name: Name of the file, relative to the folder.
        by_links: Whether a link in the folder may lead out of it, as those of DVC, git-annex and downloads of
            earlier huggingface_hub (``local_dir``) do; the name itself may not.

    Raises:
        CheckpointFormatError: If it is missing, or lies elsewhere.
    """
    path = folder / name
    # The Hub's cache keeps <repo>/snapshots/<commit>/<name> as links to <repo>/blobs/<hash>.
    roots = [folder.resolve()]
    roots += [
        (parent.parent / "blobs").resolve() for parent in roots[0].parents if parent.name == "snapshots"
    ]
    try:
        real = path.resolve()
        is_inside = any(real.is_relative_to(root) for root in roots) or (
            by_links and {os.sep, os.pardir}.isdisjoint(Path(name).parts)
        )
        if is_inside:
            real.stat()
    except PermissionError:
        raise  # which says nothing about the file
    except (OSError, RuntimeError, ValueError) as error:  # a name with a NUL byte is a ValueError
        raise CheckpointFormatError(
            f"{path!s:.500} cannot be opened: {error}; is the checkpoint complete?"
        ) from None
    if not is_inside:
        raise CheckpointFormatError(
            f"{path!s:.500} leads out of its folder, to {real}: copy it, or load the folder that has it"
        )
    return real


def resolve_folder(
    name_or_path: str | os.PathLike[str], *, revision: str | None = None, trust_remote_code: bool = False
) -> Path:
    """The folder of a checkpoint: the given one, or a snapshot in this rank's Hub cache.

    For a Hub id, one rank of each host and cache downloads while the others wait: of the commit that rank 0
    got only the config files, those of the processor, and the weight files that the index names.

    Args:
        name_or_path: A folder, or a Hub id such as ``"Qwen/Qwen3-8B"``.
        revision: Branch, tag or commit of a Hub id.
        trust_remote_code: Whether to fetch the checkpoint's Python files too.

    Raises:
        CheckpointFormatError: If it is neither a folder nor a Hub id, or is a folder on some ranks only.

    Collective: all ranks.
    """
    name = os.path.expanduser(name_or_path)
    seen = all_gather_objects(Path(name).is_dir())
    if all(seen):
        return Path(name)
    if any(seen):
        raise CheckpointFormatError(
            f"{name} is a folder on some ranks but not on {[r for r, own in enumerate(seen) if not own][:8]}"
            "; put it on a shared file system, or copy it to every node"
        )
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise CheckpointFormatError(
            f"{name} is not a folder, and no Hub id could look like this{told_of_format(Path(name))}"
        )
    try:
        return _snapshot(name, revision, trust_remote_code)
    except OSError as error:  # of the Hub or of the network, which say nothing of a folder
        error.add_note(f"{name!r} is no folder here, and so was looked for on the Hub; is it misspelt?")
        raise


def _snapshot(repo: str, revision: str | None, code: bool) -> Path:
    """Download a repository once per cache; the snapshot's folder as this rank sees it.

    Collective: all ranks.
    """
    from huggingface_hub import constants, snapshot_download

    place, rank = (socket.gethostname(), constants.HF_HUB_CACHE), this_rank()
    small = [*_CONFIG_FILES, *(["*.py"] if code else [])]

    def find() -> str:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=small))
        quantised = settings_of(folder)
        if quantised is not None:
            check(quantised)  # before hundreds of gigabytes follow
        return folder.name

    commit = share(while_others_wait(rank == 0, find, f"downloading the config of {repo}"))

    def fetch() -> None:
        folder = Path(snapshot_download(repo, revision=commit, allow_patterns=[*small, SINGLE, INDEX]))
        if names := set(read_index(folder).values()):
            snapshot_download(repo, revision=commit, allow_patterns=[glob.escape(name) for name in names])

    while_others_wait(all_gather_objects(place).index(place) == rank, fetch, f"downloading {repo}")
    with agreed(f"finding {repo} in the cache"):
        return Path(snapshot_download(repo, revision=commit, allow_patterns=small, local_files_only=True))

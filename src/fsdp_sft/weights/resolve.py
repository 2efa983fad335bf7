"""The weight files of a checkpoint's folder: their names, checked, and the headers of all their tensors."""

import glob
import os
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fsdp_sft._model.configs import told_of_format
from fsdp_sft._process.bounds import MAX_INDEX_BYTES, MAX_SETTINGS_BYTES, parse_json
from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._quantised.find import check, published
from fsdp_sft._quantised.settings import CONFIG, OTHER_FILES, settings_of
from fsdp_sft._ranks.agree import agreed, all_gather_objects, share, this_rank, while_others_wait
from fsdp_sft._tensors.disk import read_bytes
from fsdp_sft._tensors.safetensors import Header
from fsdp_sft._tensors.stored import InFile, Stored, file_header
from fsdp_sft._tensors.torch_file import read_pickled
from fsdp_sft.errors import CheckpointCorruptError, CheckpointFormatError, abridged

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED_SINGLE = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
ADAPTER = "adapter_config.json"
_INDEX_ENDING, _PICKLE_ENDING, _SAFE_ENDING = ".json", ".bin", ".safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """The files of a checkpoint with their headers read and checked.

    Attributes:
        file_bytes: Size of each file when its header was read, by its path with every symbolic link resolved.
        sources: Tensors by the names under which they are published. Of a quantised checkpoint these are the
            values that its packed tensors and their scales hold.
    """

    file_bytes: dict[Path, int]
    sources: dict[str, Stored]

    @property
    def formats(self) -> dict[str, int]:
        """Number of tensors by the format in which they are stored, the commonest first."""
        return dict(Counter(source.format for source in self.sources.values()).most_common())

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(source.entry.num_bytes for source in self.sources.values())


def find_manifest(folder: Path, *, allow_pickle: bool = False) -> str:
    """Name of a checkpoint's only weight file, or of the index of several.

    As in transformers, safetensors are preferred to pickles, and a single file to an index.

    Args:
        folder: Folder of the checkpoint.
        allow_pickle: Whether ``pytorch_model.bin`` is accepted.

    Raises:
        CheckpointFormatError: If there is no such file, or only pickles and they are not allowed, or an
            adapter of peft lies there too, which ``from_pretrained`` would apply.
    """
    if (folder / ADAPTER).is_file():
        raise CheckpointFormatError(told_of_adapter(folder, folder / ADAPTER))
    names = (SINGLE, INDEX, PICKLED_SINGLE, PICKLED_INDEX)
    found = next((name for name in names if (folder / name).exists()), None)
    if found in names[2:] and not allow_pickle:
        raise CheckpointFormatError(
            f"{folder} holds only pickled weights ({found}), which can hold code. allow_pickle=True of "
            "build_meta_model and load_weights reads their tensors and runs nothing; or convert them once: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
        )
    if found is None:
        present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        raise CheckpointFormatError(
            f"{folder} has neither {SINGLE} nor {INDEX}; it has {abridged(present)}{told_of_format(folder)}"
        )
    return found


def told_of_adapter(name: str | os.PathLike[str], settings: Path) -> str:
    """Advice, for an error, on a folder with a peft adapter, which ``from_pretrained`` would apply.

    Args:
        name: The folder, or a Hub id.
        settings: Its ``adapter_config.json``.
    """
    try:
        about = parse_json(read_bytes(settings.resolve(), MAX_SETTINGS_BYTES), ADAPTER)
        base = about.get("base_model_name_or_path")
    except (AttributeError, CheckpointCorruptError, ValueError):
        base = None
    merge = "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({}), {}).merge_and_unload()"
    if any((settings.parent / file).is_file() for file in (SINGLE, INDEX, PICKLED_SINGLE, PICKLED_INDEX)):
        return (
            f"{name} has an adapter beside its weights, which would be left out: move {ADAPTER} and "
            "adapter_model.safetensors into a folder of their own. Then it loads without them; or merge them "
            f"once, {merge.format(repr(os.fspath(name)), 'that_folder')}.save_pretrained(out), and load that"
        )
    known = f", of {base}," if base else ""
    merge = merge.format(repr(base) if base else "base", repr(os.fspath(name)))
    return (
        f"{name} holds an adapter alone{known} and no model: merge it once, {merge}.save_pretrained(out), "
        "and load that; or load the base, and add adapters anew with add_adapters"
    )


def weight_file_names(folder: Path, *, allow_pickle: bool = False) -> list[str]:
    """Names of the files that hold a checkpoint's tensors; other weight files in the folder do not count.

    Args:
        folder: Folder of the checkpoint.
        allow_pickle: See ``find_manifest``.

    Raises:
        CheckpointFormatError: If ``find_manifest`` raises it, or the index is no index or names a file
            outside the folder.
    """
    found = find_manifest(folder, allow_pickle=allow_pickle)
    return sorted(set(read_index(folder / found).values())) if found.endswith(_INDEX_ENDING) else [found]


def read_index(path: Path) -> dict[str, str]:
    """The index in a file: file name by tensor name, with every file name checked.

    Raises:
        CheckpointFormatError: If it is no index, or names a file outside its folder.
    """
    try:
        text = read_bytes(path.resolve(), MAX_INDEX_BYTES)  # in the Hub's cache it is a link
        weight_map = parse_json(text, "it", finite=True)["weight_map"]
        texts = isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values())
        if not texts or not weight_map:
            raise ValueError("weight_map is not an object of file names")
    except (OSError, CheckpointCorruptError, ValueError, KeyError, TypeError) as error:
        blame_no_file(error, path)
        raise CheckpointFormatError(f"{path} is not an index of weight files: {error!r}") from None
    for name in set(weight_map.values()):
        check_inside(name, path)
    return {str(key): str(name) for key, name in weight_map.items()}


def check_inside(name: str, index: Path) -> None:
    """Refuse a file name that could lead out of the checkpoint's folder.

    Raises:
        CheckpointFormatError: If the name is absolute, has a part such as ``..``, or another ending than the
            files of the index's kind.
    """
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ":" in name or any(part in ("", ".", "..") for part in parts):
        raise CheckpointFormatError(f"{index} names {name!r}, which leads out of its folder")
    ending = _PICKLE_ENDING if _PICKLE_ENDING in index.suffixes else _SAFE_ENDING
    if not name.endswith(ending):
        raise CheckpointFormatError(f"{index} names {name!r}, which is not a {ending} file")


def open_checkpoint(folder: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Read and check all headers of a checkpoint's files.

    Args:
        folder: A checkpoint's own folder, or a snapshot in the Hub's cache.
        allow_pickle: See ``find_manifest``. No code in a pickle is run.

    Raises:
        CheckpointFormatError: If a file is missing, damaged or outside the folder, or the index assigns a
            tensor to a file that does not have it; and if it is quantised in a way that is not read, or
            packed weights and scales do not belong together.
    """
    found = find_manifest(folder, allow_pickle=allow_pickle)
    weight_map = read_index(folder / found) if found.endswith(_INDEX_ENDING) else {}
    names = sorted(set(weight_map.values())) or [found]
    files = {name: resolved_inside(folder, name) for name in names}
    headers: dict[Path, Header] = {}
    for name, path in files.items():
        if path not in headers:  # many names may be links to one file
            headers[path] = _header(path, name)
    stored: dict[str, InFile] = {}
    for path, header in headers.items():
        for key, entry in header.entries.items():
            stored.setdefault(key, InFile(path, entry))
    for key, name in weight_map.items():
        path = files[name]
        if key not in headers[path].entries:
            raise CheckpointFormatError(
                f"{folder / found} says that {key!r} is in {name}, which does not have it"
            )
        stored[key] = InFile(path, headers[path].entries[key])
    settings = settings_of(folder)
    sources: dict[str, Stored] = {**stored} if settings is None else published(stored, settings)
    return Checkpoint({path: header.file_bytes for path, header in headers.items()}, sources)


def resolved_inside(folder: Path, name: str) -> Path:
    """The file behind a name, with links resolved: in the folder, or in the Hub cache that it belongs to.

    Raises:
        CheckpointFormatError: If it is missing, or a link leads elsewhere.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # a name with a NUL byte is a ValueError
        blame_no_file(error, path)
        raise CheckpointFormatError(
            f"{path!s:.500} cannot be opened: {error}; is the checkpoint complete?"
        ) from None
    # The Hub's cache keeps <repo>/snapshots/<commit>/<name> as links to <repo>/blobs/<hash>.
    roots = [folder.resolve()]
    roots += [
        (parent.parent / "blobs").resolve() for parent in roots[0].parents if parent.name == "snapshots"
    ]
    if not any(real.is_relative_to(root) for root in roots):
        raise CheckpointFormatError(f"{path} is a link that leads out of its folder, to {real}")
    return real


def _header(path: Path, name: str) -> Header:
    """The header of one weight file."""
    # `name` in the folder says which format it is: in the Hub's cache `path` is a hash without an ending.
    if name.endswith(_PICKLE_ENDING):
        return read_pickled(path)
    return file_header(path, CheckpointFormatError, "; if it is damaged, download it again")


# From a Hub id to a folder: one download per cache, and the same commit on every rank.

# Read by AutoProcessor, AutoImageProcessor and AutoVideoProcessor; an export copies them.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_CONFIG_FILES = [CONFIG, "generation_config.json", ADAPTER, *OTHER_FILES, *PROCESSOR_FILES]
_ATTEMPTS = 4


def resolve_folder(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Path:
    """The folder of a checkpoint: the given one, or a snapshot in this rank's Hub cache.

    For a Hub id, the lowest rank of each cache downloads while the others wait: of the commit that rank 0 got
    only the config files, those of the processor, and the weight files that the index names. An interrupted
    download continues where it stopped.

    Args:
        name_or_path: A folder, or a Hub id such as ``"Qwen/Qwen3-8B"``.
        revision: Branch, tag or commit of a Hub id.
        trust_remote_code: Whether to fetch the checkpoint's Python files too.
        allow_pickle: Whether to fetch ``pytorch_model.bin`` where there are no safetensors.

    Raises:
        CheckpointFormatError: If it is neither a folder nor a Hub id, or is a folder on some ranks only.

    Collective: all ranks.
    """
    name = os.path.expanduser(name_or_path)
    seen = all_gather_objects(Path(name).is_dir())
    if all(seen):
        return Path(name)
    if any(seen):
        missing = [rank for rank, is_folder in enumerate(seen) if not is_folder]
        raise CheckpointFormatError(
            f"{name} is a folder on some ranks but not on {missing[:8]}; put it on a shared file system, or "
            "copy it to every node"
        )
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise CheckpointFormatError(
            f"{name} is not a folder, and no Hub id could look like this{told_of_format(Path(name))}"
        )
    return _snapshot(name, revision, trust_remote_code, allow_pickle)


def _snapshot(repo: str, revision: str | None, code: bool, pickles: bool) -> Path:
    """Download a repository once per cache; the snapshot's folder as this rank sees it.

    Collective: all ranks.
    """
    from huggingface_hub import constants

    leader = _cache_leaders(Path(constants.HF_HUB_CACHE))
    rank = this_rank()
    small = [*_CONFIG_FILES, *(["*.py"] if code else [])]

    def settle() -> Path:
        folder = _fetch(repo, revision, small)
        quantised = settings_of(folder)
        if quantised is not None:
            check(quantised)  # before hundreds of gigabytes follow
        return folder

    first = while_others_wait(rank == 0, settle, f"downloading the config of {repo}")
    commit = next(path.name for path in all_gather_objects(first) if path is not None)

    def fetch() -> Path:
        # In the order in which transformers looks: a single file before an index, safetensors before pickles.
        kinds = [(SINGLE, INDEX), (PICKLED_SINGLE, PICKLED_INDEX)][: 2 if pickles else 1]
        for single, index in kinds:
            folder = _fetch(repo, commit, [*small, single, index])
            if (folder / single).exists():
                return folder
            if (folder / index).exists():
                wanted = weight_file_names(folder, allow_pickle=pickles)
                return _fetch(repo, commit, [glob.escape(name) for name in wanted])
        return folder

    mine = while_others_wait(leader == rank, fetch, f"downloading {repo}")
    with agreed(f"finding {repo} in the cache"):
        folder = mine or _fetch(repo, commit, small, local=True)
        weight_file_names(folder, allow_pickle=pickles)
    return folder


def _fetch(repo: str, revision: str | None, patterns: list[str], *, local: bool = False) -> Path:
    """Download the files that match ``patterns``, unless they are cached; retry if the connection breaks."""
    from huggingface_hub import snapshot_download

    for attempt in range(_ATTEMPTS):
        try:
            return Path(
                snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=local)
            )
        except Exception as error:
            # A refusal by the Hub (no such repository, no access) is final. A broken connection is worth
            # another attempt, which continues with what has arrived: huggingface_hub 1.5 makes none in the
            # middle of a file, and 2.4 none where the connection is reset. The classes are known by name
            # only, since huggingface_hub uses different HTTP libraries in different versions.
            names = {base.__name__ for base in type(error).__mro__}
            if not names & {"TransportError", "ConnectionError"} or attempt == _ATTEMPTS - 1:
                error.add_note(
                    f"while fetching {repo!r} from the Hub: is that its name, is there a network, and may "
                    "this account read it (HF_TOKEN)? A folder of this machine is given by its path"
                )
                raise
            time.sleep(2**attempt)
    raise AssertionError


def _cache_leaders(cache: Path) -> int:
    """The lowest rank that shares this rank's cache.

    Every rank puts a file with its number into its cache. Once all have, the files there are those of the
    ranks that share it.

    Collective: all ranks.
    """
    token = share(uuid.uuid4().hex)
    marker = cache / f".fsdp-sft-{token}-{this_rank()}"
    written = True
    try:
        cache.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError:
        written = (
            False  # nothing can be downloaded to such a cache, so its rank waits for no other and looks alone
        )
    all_gather_objects(written)  # a barrier: all markers exist
    ranks = [int(path.name.rpartition("-")[2]) for path in cache.glob(f".fsdp-sft-{token}-*")]
    all_gather_objects(None)  # a barrier: all ranks have looked, markers may go
    if written:
        marker.unlink(missing_ok=True)
    return min(ranks, default=this_rank()) if written else this_rank()

"""From a Hub id to a folder: one download per cache, and the same commit on every rank."""

import glob
import os
import time
import uuid
from pathlib import Path

from fsdp_sft._model.configs import told_of_format
from fsdp_sft._quantised.find import check
from fsdp_sft._quantised.settings import CONFIG, OTHER_FILES, settings_of
from fsdp_sft._ranks.agree import agreed, all_gather_objects, share, this_rank, while_others_wait
from fsdp_sft.errors import CheckpointFormatError
from fsdp_sft.weights.resolve import (
    ADAPTER,
    INDEX,
    PICKLED_INDEX,
    PICKLED_SINGLE,
    SINGLE,
    weight_file_names,
    with_variant,
)

# Read by AutoProcessor, AutoImageProcessor and AutoVideoProcessor; an export copies them.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_CONFIG_FILES = [CONFIG, "generation_config.json", ADAPTER, *OTHER_FILES, *PROCESSOR_FILES]
_ATTEMPTS = 4


def resolve_folder(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    variant: str | None = None,
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
        variant: Variant of the weight files, such as ``"fp16"``.
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
    return _snapshot(name, revision, variant, trust_remote_code, allow_pickle)


def _snapshot(repo: str, revision: str | None, variant: str | None, code: bool, pickles: bool) -> Path:
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
            names = [with_variant(single, variant), with_variant(index, variant)]
            folder = _fetch(repo, commit, [*small, *names])
            if (folder / names[0]).exists():
                return folder
            if (folder / names[1]).exists():
                wanted = weight_file_names(folder, variant, allow_pickle=pickles)
                return _fetch(repo, commit, [glob.escape(name) for name in wanted])
        return folder

    mine = while_others_wait(leader == rank, fetch, f"downloading {repo}")
    with agreed(f"finding {repo} in the cache"):
        folder = mine or _fetch(repo, commit, small, local=True)
        weight_file_names(folder, variant, allow_pickle=pickles)
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

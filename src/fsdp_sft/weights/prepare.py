"""A base model that is converted and cast once, so that each experiment begins by reading its own shards."""

import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from filelock import FileLock
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_sft._compat.models import tied_names
from fsdp_sft._model.state import model_tensors
from fsdp_sft._model.twin import meta_twin
from fsdp_sft._process.dtypes import check_dtypes
from fsdp_sft._process.words import answered
from fsdp_sft._ranks.agree import agreed, share, this_rank, while_others_wait
from fsdp_sft._tensors.disk import full_path, sweep, unsound_beside
from fsdp_sft.dcp_io.content import FolderContent, describe_mesh
from fsdp_sft.dcp_io.folder import write_folder
from fsdp_sft.dcp_io.verify import verify_folder
from fsdp_sft.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from fsdp_sft.sac import Ratio
from fsdp_sft.shard.apply import shard_model
from fsdp_sft.weights import load_weights
from fsdp_sft.weights.digest import source_digest
from fsdp_sft.weights.hub import resolve_folder
from fsdp_sft.weights.load import Strategy
from fsdp_sft.weights.meta import meta_model
from fsdp_sft.weights.prepared import load_prepared_base, open_prepared
from fsdp_sft.weights.prepared_note import NOTE_NAME, PreparedBase, prepared_at
from fsdp_sft.weights.pretrained import sharded_model
from fsdp_sft.weights.resolve import open_checkpoint, resolved_inside

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def prepare_base(
    name_or_path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    *,
    mesh: "DeviceMesh",
    master_dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    strategy: Strategy = "auto",
    host_budget_bytes: int = 1 << 30,
    missing: Literal["error", "initialise"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    check_finite: bool = True,
) -> Path:
    """Load a checkpoint once and keep it converted and cast, for ``load_prepared`` to read.

    If a model prepared from the same source, dtype and format exists, its folder is returned at once. Any
    number of jobs may call this at the same time: one prepares and the others wait for it. If that job dies,
    another one takes its place. A folder appears under its name only when it is complete.

    The folder's name contains a digest of the options that change the result; of the source's configuration;
    of each weight file's name and either the Hub's checksum or size, modification time and samples of the
    contents; and of the versions of torch and transformers. So a source that is changed in place is prepared
    anew, and so is every source after an upgrade.

    Args:
        name_or_path: A folder, or a Hub id.
        cache_dir: Folder of all prepared models, on a file system that all ranks share; made if need be.
        mesh: Device mesh from ``build_mesh``. The prepared model can be loaded on any other mesh.
        master_dtype: Dtype of the stored shards.
        revision: Branch, tag or commit of a Hub id.
        strategy: See ``load_weights``.
        host_budget_bytes: See ``load_weights``.
        missing: See ``load_weights``.
        unexpected: See ``load_weights``.
        trust_remote_code: See ``build_meta_model``.
        allow_pickle: See ``load_weights``.
        check_finite: See ``load_weights``.

    Returns:
        The folder for ``load_prepared``. ``build_meta_model`` and ``load_weights`` read it too.

    Raises:
        CheckpointFormatError: If the source is damaged, unsafe or does not fit.
        CheckpointError: If ranks do not share the file system.
        UnstorableStateError: If a module has extra state, or makes tensors for its state dict.
        OSError: If writing fails on any rank; nothing is left behind.

    Collective: all ranks of the mesh, which are all ranks of the job.
    Memory: The same as ``load_pretrained``, and one local shard of a tensor in CPU memory.

    Example:
        >>> folder = fs.prepare_base(path, "prepared", mesh=mesh, master_dtype=torch.bfloat16)
        >>> again = fs.prepare_base(path, "prepared", mesh=mesh, master_dtype=torch.bfloat16)
        >>> again == folder  # at once
        True
        >>> model = fs.load_prepared(folder, mesh=mesh)
    """
    check_dtypes(master_dtype=master_dtype)
    source = resolve_folder(
        name_or_path, revision=revision, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle
    )
    target: Path | None = None
    with agreed(f"looking for a prepared {name_or_path}"):
        if prepared_at(source) is not None:
            raise CheckpointFormatError(f"{source} is a prepared base already: load_prepared reads it")
        if this_rank() == 0:
            digest = source_digest(
                source, master_dtype, missing, trust_remote_code, allow_pickle, check_finite
            )
            label = re.sub(r"[^\w.-]+", "-", os.fspath(name_or_path)).strip("-.")[-80:]
            target = full_path(cache_dir) / f"{label}-{digest[:20]}"
            target.parent.mkdir(parents=True, exist_ok=True)
    target = Path(share(target))
    lock = FileLock(target.with_name(f".claim-{target.name}"), thread_local=False)

    def wait() -> bool:
        lock.acquire()
        return not _is_sound(target)

    if not share(while_others_wait(this_rank() == 0, wait, f"waiting for {target}")):
        lock.release()
        return target
    if this_rank() == 0:
        sweep(target)
    try:
        with agreed("building the model"):
            model = meta_model(
                source,
                dtype=master_dtype,
                trust_remote_code=trust_remote_code,
                allow_pickle=allow_pickle,
            )
        shard_model(model, mesh=mesh, master_dtype=master_dtype)
        load_weights(
            model,
            source,
            strategy=strategy,
            host_budget_bytes=host_budget_bytes,
            missing=missing,
            unexpected=unexpected,
            allow_pickle=allow_pickle,
            check_finite=check_finite,
        )
        keys = sorted(open_checkpoint(source, allow_pickle=allow_pickle).sources)
        _write(model, source, PreparedBase(target, os.path.expanduser(name_or_path), master_dtype, keys))
    finally:
        lock.release()
    return target


@answered
def load_prepared(
    path: str | os.PathLike[str],
    *,
    mesh: "DeviceMesh",
    master_dtype: torch.dtype | None = None,
    verify: bool = True,
    frozen_dtype: torch.dtype | str | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    sac_ratio: Ratio = 0,
    compile: bool = False,  # noqa: A002  the word that torch uses for it
    peft_config: "PeftConfig | None" = None,
    new_vocab_size: int | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    reshard_after_forward: bool | int = True,
    freeze_towers: bool = True,
) -> "PreTrainedModel":
    """Build a prepared model, shard it and read its shards: bitwise the result of ``load_pretrained``.

    For other options call ``build_meta_model``, ``add_adapters``, ``apply_sac``, ``shard_model`` and
    ``load_weights``, with the prepared folder as the checkpoint.

    Args:
        path: Folder that ``prepare_base`` returned.
        mesh: Device mesh from ``build_mesh``, of any size and shape.
        master_dtype: Dtype in which it must have been prepared; None accepts any.
        verify: Whether to compare every file's checksum, each file on one rank. False compares names, sizes
            and headers only.
        frozen_dtype: See ``load_pretrained``, as for all that follow.
        mp_policy: See ``shard_model``.
        sac_ratio: Fraction of blocks whose activations are recomputed.
        compile: Whether to compile each block.
        peft_config: Configuration of adapters to train instead of the model.
        new_vocab_size: Number of tokens for which the model is to have rows.
        attn_implementation: See ``build_meta_model``.
        trust_remote_code: See ``build_meta_model``.
        reshard_after_forward: See ``shard_model``.
        freeze_towers: See ``load_pretrained``.

    Returns:
        The model in ``train()`` mode; ``model.load_report`` is a ``LoadReport``.

    Raises:
        CheckpointNotFoundError: If there is no such folder.
        CheckpointCorruptError: If a file is damaged.
        CheckpointMismatchError: If it was prepared in another dtype, or this version of transformers builds
            another model of the config; prepare it anew.

    Collective: all ranks of the mesh, which are all ranks of the job.
    Memory: The shards, and a buffer of 1 MiB (for an accelerator two of 8 MiB) for each of at most 4 threads.

    Example:
        >>> folder = fs.prepare_base(path, "prepared", mesh=mesh)
        >>> model = fs.load_prepared(folder, mesh=mesh, sac_ratio="1/2")
        >>> model.load_report.strategy
        'prepared'
    """
    started = time.perf_counter()
    folder = full_path(path)
    with agreed(f"looking for {folder}"):
        base = _found(folder, master_dtype)
    manifest = open_prepared(base, verify=verify)
    model = sharded_model(
        folder,
        mesh=mesh,
        master_dtype=base.dtype,
        frozen_dtype=frozen_dtype,
        mp_policy=mp_policy,
        sac_ratio=sac_ratio,
        compile=compile,
        peft_config=peft_config,
        new_vocab_size=new_vocab_size,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        reshard_after_forward=reshard_after_forward,
        towers_too=not freeze_towers,
    )
    model.load_report = load_prepared_base(model, base, manifest, check_finite=False, started=started)
    return model.train()  # type: ignore[no-any-return]


def _found(folder: Path, master_dtype: torch.dtype | None) -> PreparedBase:
    """The prepared base in a folder, in the dtype that is asked for."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there is no prepared model at {folder}; prepare_base makes one")
    base = prepared_at(folder)
    if base is None:
        raise CheckpointMismatchError(
            f"{folder} was not made by prepare_base, or in another format; call prepare_base again (a step "
            "of training is for load_checkpoint)"
        )
    if master_dtype not in (None, base.dtype):
        raise CheckpointMismatchError(
            f"{folder} was prepared in {base.dtype}, not {master_dtype}; leave master_dtype out, or call "
            f"prepare_base with master_dtype={master_dtype}"
        )
    return base


def _write(model: Any, source: Path, base: PreparedBase) -> None:
    """Write a loaded model to the folder of ``base``, in the format of a checkpoint of this library.

    Collective: all ranks.
    """
    target = base.folder
    with agreed(f"preparing to write {target}"):
        content = FolderContent(
            step=None,
            mesh=describe_mesh(model),
            model=model_tensors(model),
            settings={NOTE_NAME: base.note(), **_settings(source, model)} if this_rank() == 0 else {},
        )
        if this_rank() == 0 and os.path.lexists(target):  # `_is_sound` has found it damaged
            os.rename(target, unsound_beside(target))
    try:
        write_folder(target, content)
    except Exception:
        if not share(this_rank() == 0 and _is_sound(target)):
            raise  # if sound, another job, which took this one for dead, has made the folder first


def _settings(source: Path, model: Any) -> dict[str, bytes]:
    """The files, by name, that a model without weights is built from."""
    names = ["config.json", "generation_config.json", *(path.name for path in sorted(source.glob("*.py")))]
    found = {name: resolved_inside(source, name).read_bytes() for name in names if (source / name).exists()}
    config = json.loads(found["config.json"])
    if set(tied_names(meta_twin(model))) - set(tied_names(model)):
        # The config ties two tensors that differ in the checkpoint, so load_pretrained has kept them apart.
        config["tie_word_embeddings"] = False
        found["config.json"] = json.dumps(config, indent=2).encode()
    return found


def _is_sound(target: Path) -> bool:
    """Whether there is a complete folder at ``target``; the contents of its files are not read."""
    return target.is_dir() and not verify_folder(target, hashes=False)

"""A base model that is converted and cast once, so that each experiment begins by reading its own shards."""

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp_sft._agree import agreed, all_reduce_sum, share, this_rank, while_others_wait
from fsdp_sft._boxes import box_of
from fsdp_sft._codec import dumps
from fsdp_sft._compat import match_checkpoint_keys, tied_names, weight_conversions
from fsdp_sft._disk import full_path, sweep, unsound_beside
from fsdp_sft._dtypes import check_dtypes
from fsdp_sft._lock import Lock, claim_on
from fsdp_sft._model import ModelTensors, clean_name, meta_twin, model_tensors, named_tensors
from fsdp_sft._reader import threads_that_read
from fsdp_sft._stored import InFile, Stored, StoredFolder
from fsdp_sft.adapters import add_adapters, without_adapters
from fsdp_sft.dcp_io.checkpoint import read_train_state
from fsdp_sft.dcp_io.content import FolderContent, describe_mesh
from fsdp_sft.dcp_io.folder import open_folder, write_folder
from fsdp_sft.dcp_io.manifest import MANIFEST_NAME, Manifest
from fsdp_sft.dcp_io.model_state import check_model
from fsdp_sft.dcp_io.stored import SHARDS, StoredTensor
from fsdp_sft.dcp_io.verify import verify_folder
from fsdp_sft.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnstorableStateError,
)
from fsdp_sft.pretrained import frozen_dtype_of
from fsdp_sft.sac import Placement, Ratio, apply_sac, parse_ratio
from fsdp_sft.shard import compile_blocks, shard_model
from fsdp_sft.weights import LoadReport, load_weights
from fsdp_sft.weights.account import account, filled_in_base
from fsdp_sft.weights.digest import source_digest
from fsdp_sft.weights.fill import Reading, fill
from fsdp_sft.weights.hub import resolve_folder
from fsdp_sft.weights.load import Strategy
from fsdp_sft.weights.meta import meta_model
from fsdp_sft.weights.plan import LoadPlan, Target
from fsdp_sft.weights.resolve import Checkpoint, open_checkpoint, resolved_inside
from fsdp_sft.weights.vocabulary import shapes_before_new_tokens

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

FORMAT_VERSION = 1


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

    If a prepared model of the same source, dtype and format is there already, its folder is returned at once.
    Any number of jobs may call this at the same time: one prepares and the others wait for it. If that job
    dies, another one takes its place. A folder appears under its name only when it is complete.

    The name of the folder contains a digest. It covers the source's configuration; of each weight file the
    name, and either the Hub's checksum or the size, the time of the last change and samples of the contents;
    and the versions of torch and transformers, which decide what a checkpoint becomes. A source that is
    changed in place is therefore prepared anew, and so is every source after an upgrade.

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
        The folder for ``load_prepared``.

    Raises:
        CheckpointFormatError: If the source is damaged, unsafe or does not fit.
        CheckpointError: If ranks do not share the file system.
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
        if this_rank() == 0:
            digest = source_digest(
                FORMAT_VERSION, source, master_dtype, missing, trust_remote_code, allow_pickle, check_finite
            )
            label = re.sub(r"[^\w.-]+", "-", os.fspath(name_or_path)).strip("-.")[-80:]
            target = full_path(cache_dir) / f"{label}-{digest[:20]}"
            target.parent.mkdir(parents=True, exist_ok=True)
    target = Path(share(target))
    lock = Lock(claim_on(target))
    wait = partial(lock.take_or_wait, partial(_is_sound, target))
    if not share(while_others_wait(this_rank() == 0, wait, f"waiting for {target}")):
        return target
    if this_rank() == 0:
        sweep(target)
    try:
        with agreed("building the model"):
            model = meta_model(
                source,
                dtype=master_dtype,
                attn_implementation=None,
                trust_remote_code=trust_remote_code,
                allow_pickle=allow_pickle,
                new_vocab_size=None,
                config_overrides=None,
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
        _write(model, target, source, os.path.expanduser(name_or_path), master_dtype, allow_pickle)
    finally:
        lock.end()
    return target


def load_prepared(
    path: str | os.PathLike[str],
    *,
    mesh: "DeviceMesh",
    master_dtype: torch.dtype | None = None,
    verify: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    sac_ratio: Ratio = 0,
    sac_placement: Placement = "even",
    sac_save: str | Iterable[str] | None = None,
    sac_offload: bool = False,
    compile: bool = False,  # noqa: A002  the word that torch uses for it
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    reshard_after_forward: bool | int = True,
    offload_policy: OffloadPolicy | None = None,
    prefetch: int = 0,
    ep_size: int = 1,
    peft_config: "PeftConfig | None" = None,
    adapter_seed: int = 0,
    frozen_dtype: torch.dtype | None = None,
    new_vocab_size: int | None = None,
    config_overrides: Mapping[str, Any] | None = None,
) -> "PreTrainedModel":
    """Build a prepared model, shard it and read its shards. Bit for bit the result of ``load_pretrained``.

    Args:
        path: Folder that ``prepare_base`` returned.
        mesh: Device mesh from ``build_mesh``, of any size and shape.
        master_dtype: Dtype in which it must have been prepared; None accepts any.
        verify: Whether to compare every file's checksum, each file on one rank. False compares names, sizes
            and headers only.
        mp_policy: See ``shard_model``.
        sac_ratio: See ``apply_sac``.
        sac_placement: ``"even"`` or ``"prefix"``; see ``apply_sac``.
        sac_save: Names of submodules whose costly outputs these blocks keep; see ``save`` of ``apply_sac``.
        sac_offload: Whether the tensors that these blocks keep wait in host memory; see ``apply_sac``.
        compile: Whether to compile each block.
        attn_implementation: See ``build_meta_model``.
        trust_remote_code: See ``build_meta_model``.
        reshard_after_forward: See ``shard_model``.
        offload_policy: See ``shard_model``.
        prefetch: See ``shard_model``.
        ep_size: See ``shard_model``. A prepared model can be loaded with any ``ep_size``.
        peft_config: See ``load_pretrained``.
        adapter_seed: Seed of the adapters' initialisation.
        frozen_dtype: Dtype of the stored shards that are frozen; see ``load_pretrained``.
        new_vocab_size: Number of tokens for which the model is to have rows; see ``load_pretrained``.
        config_overrides: Fields of the config to replace, such as ``{"attention_dropout": 0.1}``.

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
        if not (folder / MANIFEST_NAME).exists():
            raise CheckpointNotFoundError(f"there is no prepared model at {folder}; prepare_base makes one")
    manifest, problems = open_folder(folder, hashes=verify)
    if manifest is None:
        raise CheckpointCorruptError(
            f"{folder} is not sound: {'; '.join(problems[:5])}; delete it and call prepare_base again"
        )
    with agreed(f"building the model of {folder}"):
        about = _about(folder, manifest, master_dtype)
        dtype = getattr(torch, about["master_dtype"])
        model: Any = meta_model(
            folder / "settings",
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            new_vocab_size=new_vocab_size,
            config_overrides=config_overrides,
        )
        model.config.name_or_path = model.name_or_path = about["name"]
        model = _prepare_blocks(
            model,
            peft_config=peft_config,
            adapter_seed=adapter_seed,
            sac_ratio=sac_ratio,
            sac_placement=sac_placement,
            sac_save=sac_save,
            sac_offload=sac_offload,
            compile=compile,
        )
    shard_model(
        model,
        mesh=mesh,
        master_dtype=dtype,
        frozen_dtype=frozen_dtype_of(frozen_dtype, peft_config, mp_policy),
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
        offload_policy=offload_policy,
        prefetch=prefetch,
        ep_size=ep_size,
    )
    model.load_report = _load(model, folder, manifest, about, started)
    return model.train()  # type: ignore[no-any-return]


def _prepare_blocks(
    model: Any,
    *,
    peft_config: "PeftConfig | None",
    adapter_seed: int,
    sac_ratio: Ratio,
    sac_placement: Placement,
    sac_save: str | Iterable[str] | None,
    sac_offload: bool,
    compile: bool,  # noqa: A002
) -> Any:
    """Prepare a model on the meta device for sharding: adapters, activation checkpointing, compilation.

    Returns:
        The model, or with adapters the ``PeftModel`` around it.
    """
    if peft_config is not None:
        model = add_adapters(model, peft_config, seed=adapter_seed)
    for name, given in (("sac_offload", sac_offload), ("sac_save", sac_save is not None)):
        if given and not parse_ratio(sac_ratio):
            raise ValueError(f"{name} is for blocks that are recomputed, and sac_ratio is {sac_ratio!r}")
    if sac_ratio:
        apply_sac(model, sac_ratio, placement=sac_placement, save=sac_save, offload=sac_offload)
    if compile:
        compile_blocks(model)
    return model


def _write(
    model: Any, target: Path, source: Path, name: str, master_dtype: torch.dtype, allow_pickle: bool
) -> None:
    """Write a loaded model to ``target``, in the format of a checkpoint of this library.

    Collective: all ranks.
    """
    content = FolderContent(step=None, mesh=None)
    with agreed(f"preparing to write {target}"):
        about = {
            "prepared": FORMAT_VERSION,
            "name": name,
            "master_dtype": str(master_dtype).removeprefix("torch."),
            "source_keys": sorted(open_checkpoint(source, allow_pickle=allow_pickle).sources),
        }
        content = FolderContent(
            step=None,
            mesh=describe_mesh(model),
            model=_plain_tensors(model),
            train_state=dumps(about),
            settings=_settings(source, model) if this_rank() == 0 else {},
        )
        if this_rank() == 0 and os.path.lexists(target):  # `_is_sound` has found it damaged
            os.rename(target, unsound_beside(target))
    try:
        write_folder(target, content)
    except Exception:
        if not share(this_rank() == 0 and _is_sound(target)):
            raise  # otherwise another job, which took this one for dead, has made the folder first


def _plain_tensors(model: Any) -> ModelTensors:
    """The model's tensors; a model whose modules make state of their own for a state dict is refused."""
    content = model_tensors(model)
    if content.made or content.extra:
        raise UnstorableStateError(
            f"modules of {type(model).__name__} keep state in a form of their own "
            f"({sorted([*content.made, *content.extra])[:4]}), which prepare_base does not store: use "
            "load_pretrained"
        )
    return content


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


def _about(folder: Path, manifest: Manifest, master_dtype: torch.dtype | None) -> Any:
    """What ``_write`` noted about a prepared model, checked."""
    about = read_train_state(folder, manifest)
    if not isinstance(about, dict) or about.get("prepared") != FORMAT_VERSION or manifest.model is None:
        raise CheckpointMismatchError(
            f"{folder} was not made by prepare_base, or in another format; call prepare_base again (a step "
            "of training is for load_checkpoint)"
        )
    if not isinstance(getattr(torch, str(about["master_dtype"]), None), torch.dtype):
        raise CheckpointCorruptError(f"{folder} names {about['master_dtype']!r}, which is no dtype of torch")
    own = getattr(torch, about["master_dtype"])
    if master_dtype not in (None, own):
        raise CheckpointMismatchError(
            f"{folder} was prepared in {own}, not {master_dtype}; call prepare_base with that master_dtype"
        )
    return about


def _load(
    model: Any, folder: Path, manifest: Manifest, about: Mapping[str, Any], started: float
) -> LoadReport:
    """Read a prepared model into the shards of ``model``, which are still on the meta device.

    Collective: all ranks.
    """
    with agreed(f"comparing the model with {folder}"):
        with without_adapters(model) as base:
            twin = meta_twin(base)
            plan = LoadPlan(
                twin=twin, conversions=weight_conversions(twin), before=shapes_before_new_tokens(base)
            )
            checkpoint = _planned(base, folder, _stored(base, manifest), plan)
            # This marks the conversions that the source has gone through: an export runs them backwards.
            match_checkpoint_keys(twin, about["source_keys"], plan.conversions)
            filled = filled_in_base(base, checkpoint=plan.targets, initialised=(), computed=plan.computed)
        accounted = account(model, filled)
    bytes_read = fill(model, plan, checkpoint, accounted, Reading(workers=threads_that_read()))
    return LoadReport(
        bytes_read=bytes_read,
        job_bytes_read=int(all_reduce_sum([bytes_read])[0]),
        checkpoint_bytes=sum(
            r.size for n, r in manifest.files.items() if n.startswith((f"{SHARDS}/", "model/"))
        ),
        seconds=time.perf_counter() - started,
        loaded=list(plan.targets),
        missing=[],
        unexpected=[],
        initialised=[],
        strategy="prepared",
        reason="every rank reads its own shards of what prepare_base wrote",
        class_bytes={},
        sources=accounted,
    )


def _stored(base: Any, manifest: Manifest) -> dict[str, StoredTensor]:
    """The stored tensor for each tensor of the model, by the first of its names.

    Raises:
        CheckpointMismatchError: If names, ties, shapes or dtypes differ. Two differences are allowed because
            the caller asked for them: rows for new tokens, and frozen shards in another dtype.
    """
    before = shapes_before_new_tokens(base)
    state = {clean_name(name): tensor for name, tensor in base.state_dict(keep_vars=True).items()}
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in state.items():
        names[name] = first.setdefault(id(tensor), name)
    as_stored = {}
    for name in first.values():
        entry = (manifest.model or {}).get(name)
        tensor = state[name]
        is_cast = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        dtype = entry.dtype if entry is not None and is_cast else tensor.dtype
        as_stored[name] = torch.empty(before.get(name, tensor.shape), dtype=dtype, device="meta")
    return check_model(manifest, ModelTensors(as_stored, names, []))


def _planned(base: Any, folder: Path, stored: Mapping[str, StoredTensor], plan: LoadPlan) -> Checkpoint:
    """Add the stored tensors to a plan, each with the parts that this rank needs; where these parts lie."""
    files, tensors = StoredFolder(folder), named_tensors(base)
    sources: dict[str, Stored] = {}
    for name, entry in stored.items():
        pieces = []
        for file, part in entry.parts(box_of(tensors[name])):
            key = f"{entry.key} in {file}"
            place = InFile(folder / file, files.header(file).entries[entry.key])
            sources[key] = place
            pieces.append(place.piece(key, part.offset))
        is_parameter = isinstance(tensors[name], torch.nn.Parameter)
        plan.targets[name] = Target(name, entry.shape, "region", tuple(pieces), None, is_parameter)
    return Checkpoint(folder, {}, sources)


def _is_sound(target: Path) -> bool:
    """Whether there is a complete folder at ``target``; the contents of its files are not read."""
    return target.is_dir() and not verify_folder(target, hashes=False)

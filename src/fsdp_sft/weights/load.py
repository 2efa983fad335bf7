"""Loading a Hugging Face checkpoint into a model: plan, agreement between ranks, reads, report."""

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_sft._model.adapters import add_adapters, refuse_initialised_from_base
from fsdp_sft._model.blocks import freeze_towers as freeze_towers_of
from fsdp_sft._model.sharded import mesh_of
from fsdp_sft._model.view import base_of, inner_model, reshard, transformers_models
from fsdp_sft._process.devices import check_dtypes
from fsdp_sft._ranks.agree import agree_on, agreed, all_reduce_sum, tell
from fsdp_sft.sac import Ratio, apply_sac
from fsdp_sft.shard.apply import shard_model
from fsdp_sft.shard.compile import compile_blocks
from fsdp_sft.shard.packing import check_frozen_dtype
from fsdp_sft.weights.fill import fill
from fsdp_sft.weights.meta import build
from fsdp_sft.weights.plan import account, make_plan
from fsdp_sft.weights.resolve import Checkpoint, resolve_folder

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class LoadReport:
    """What ``load_weights`` read, wrote and decided.

    Attributes:
        bytes_read: Tensor bytes that this rank has read.
        job_bytes_read: Tensor bytes that all ranks together have read.
        checkpoint_bytes: Bytes of all tensors in the checkpoint.
        seconds: Duration of planning and reading, on this rank; not of a download.
        loaded: Names of the parameters and buffers that were filled from the checkpoint.
        missing: Names that the checkpoint has no values for, though the model's class expects them.
        unexpected: Names in the checkpoint that the model has no place for.
        initialised: Names that the model's own initialisation filled: the missing ones, and those that its
            class allows to be missing.
        formats: Number of the checkpoint's tensors by the format in which they are stored, such as
            ``"bf16"``, ``"fp8 128x128"`` or ``"mxfp4"``.
        sources: Source of the values of every parameter and buffer, by name: ``"checkpoint"``, ``"tie"``
            (another name of a tensor listed before), ``"initialised"``, ``"computed"``, ``"copy"`` (of
            ``modules_to_save``) or ``"kept"`` (it had values already, as adapters have).

    Example:
        >>> report = model.load_report
        >>> report.bytes_read == report.checkpoint_bytes  # one rank reads all of it, once
        True
        >>> print(report)
        loaded ... tensors: ... read by all ranks, ... by this one, in ... s (... GB/s)
    """

    bytes_read: int
    job_bytes_read: int
    checkpoint_bytes: int
    seconds: float
    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    initialised: list[str]
    formats: dict[str, int]
    sources: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        speed = self.job_bytes_read / self.seconds / 1e9 if self.seconds > 0 else 0.0
        return (
            f"loaded {len(self.loaded)} tensors: {_readable(self.job_bytes_read)} of "
            f"{' and '.join(self.formats)} read by all ranks, "
            f"{_readable(self.bytes_read)} by this one, in {self.seconds:.2f} s ({speed:.2f} GB/s)"
        )


def _readable(num_bytes: int) -> str:
    """A number of bytes in words."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def load_weights(
    model: nn.Module,
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    missing: Literal["error", "initialise"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    seed: int = 0,
) -> LoadReport:
    """Stream a safetensors checkpoint into a model's shards, casting each piece on its way.

    Every parameter and buffer ends up bitwise as plain ``from_pretrained`` would have it: transformers' own
    renames and conversions are applied, computed buffers are recomputed, and ties are kept. A rank reads only
    the bytes that its shards are made of; of replicas one reads each tensor, and the others receive it.
    Parameters keep their dtype and ``requires_grad``, and the model keeps its mode.

    Args:
        model: Model from ``build_meta_model``, usually after ``shard_model``; on the meta device or not. With
            adapters, its base model is loaded, and ``modules_to_save`` are copied from it.
        name_or_path: A folder, or a Hub id.
        revision: Branch, tag or commit of a Hub id.
        missing: What to do about keys that the checkpoint lacks: ``"error"``, or ``"initialise"`` to fill
            them with the model's own initialisation, the same on all ranks.
        unexpected: What to do about keys that the model lacks: ``"error"`` or ``"ignore"``.
        seed: Seed of that initialisation.

    Returns:
        What was read, from where, and how long it took.

    Raises:
        CheckpointFormatError: If the checkpoint is damaged, unsafe or does not fit the model; it has the
            names of what is missing or unexpected. Also if a conversion computes, as none of transformers'
            own does.
        CheckpointMismatchError: If the model has a tensor on the meta device that nothing has values for,
            such as adapters that ``peft.get_peft_model`` made there. Nothing has been read then.
        UnsupportedModelError: If the adapters were initialised from other base weights, or the model is cut
            into stages or along layers.
        ValueError: If an argument is out of range.
        TypeError: If the model is none of transformers; if it has one inside, the message names it.

    Collective: all ranks. An error on one is raised on all.
    Memory: The shards. On the host a read buffer of a quarter of a MiB for each of at most 4 threads, or for
        an accelerator a pinned one of 8 MiB; of packed weights up to 24 MB for each thread; and the keys that
        are initialised. On an accelerator, beside the shards, at most two pieces of 8 MiB per thread.

    Example:
        >>> model = fs.build_meta_model(path)
        >>> shards = fs.shard_model(model, mesh=mesh)
        >>> report = fs.load_weights(model, path)
        >>> report.missing, report.unexpected
        ([], [])
    """
    for name, value, allowed in (
        ("missing", missing, ("error", "initialise")),
        ("unexpected", unexpected, ("error", "ignore")),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    if all(prefix for prefix, _ in transformers_models(base_of(model))):
        raise TypeError(
            f"load_weights loads a transformers model, got "
            f"{type(base_of(model)).__name__.removeprefix('FSDP')}{inner_model(base_of(model))}; "
            "load_full_state_dict reads a module of one's own"
        )
    reshard(model)
    mesh_of(model)  # refuses a model that is cut into stages or along layers
    folder = resolve_folder(name_or_path, revision=revision)
    return _load(model, Checkpoint(str(folder)), missing, unexpected, seed)


def _load(model: nn.Module, checkpoint: Checkpoint, missing: str, unexpected: str, seed: int) -> LoadReport:
    """Plan what is read for each tensor, agree on it, and read.

    Collective: all ranks.
    """
    started = time.perf_counter()
    with agreed("planning the load"):
        refuse_initialised_from_base((getattr(model, "peft_config", None) or {}).values())
        plan = make_plan(model, checkpoint.stored, missing=missing, unexpected=unexpected)
        sources = account(plan)
        facts = {"missing": missing, "unexpected": unexpected, "seed": seed, "checkpoint": plan.digest()}
    agree_on(f"loading {checkpoint.name}", **facts)
    bytes_read = fill(plan, seed=seed)
    report = LoadReport(
        bytes_read=bytes_read,
        job_bytes_read=int(all_reduce_sum([bytes_read])[0]),
        checkpoint_bytes=sum(tensor.entry.num_bytes for tensor in plan.stored.values()),
        seconds=time.perf_counter() - started,
        loaded=[*plan.targets, *(target.name for target in plan.duplicates)],
        missing=plan.missing,
        unexpected=plan.unexpected,
        initialised=plan.initialised,
        formats=dict(Counter(tensor.format for tensor in plan.stored.values()).most_common()),
        sources=sources,
    )
    tell(_logger, "%s: %s", getattr(model, "name_or_path", "") or type(model).__name__, report)
    return report


def load_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    mesh: DeviceMesh | None = None,
    master_dtype: torch.dtype = torch.float32,
    frozen_dtype: torch.dtype | str | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    sac_ratio: Ratio = 0,
    compile: bool = False,  # noqa: A002  the word that torch uses for it
    peft_config: "PeftConfig | None" = None,
    new_vocab_size: int | None = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    reshard_after_forward: bool | int = True,
    freeze_towers: bool = True,
) -> "PreTrainedModel":
    """Build a checkpoint's model on the meta device, prepare its blocks, shard it, and load it.

    It calls ``build_meta_model``, ``freeze_towers``, ``add_adapters``, ``apply_sac``, ``compile_blocks``,
    ``shard_model`` and ``load_weights``, in this order. Call these yourself for options that it does not
    take.

    Args:
        name_or_path: A folder, or a Hub id.
        mesh: Device mesh from ``build_mesh``; None takes the one that was made, or else all ranks (FSDP).
        master_dtype: Dtype of the stored shards that are trained.
        frozen_dtype: Dtype of the stored shards that are frozen, or ``"stored"``, ``"nf4"`` or ``"fp8"`` for
            packed ones (see ``shard_model``); None is the policy's compute dtype with
            adapters or frozen towers, and ``master_dtype`` without.
        mp_policy: Compute and reduction dtypes; None is bfloat16 compute with float32 reduction, and
            ``MixedPrecisionPolicy()`` computes in float32.
        sac_ratio: Fraction of blocks whose activations are recomputed; see ``apply_sac``.
        compile: Whether to compile each block.
        peft_config: Configuration of adapters to train instead of the model; see ``add_adapters``. The result
            is then a ``PeftModel``.
        new_vocab_size: Number of tokens for which the model is to have rows, such as ``len(tokenizer)`` after
            tokens were added to it; a number for which it has rows already changes nothing. See
            ``build_meta_model``.
        revision: Branch, tag or commit of a Hub id.
        attn_implementation: See ``build_meta_model``.
        trust_remote_code: See ``build_meta_model``.
        reshard_after_forward: See ``shard_model``.
        freeze_towers: Whether the vision and audio towers of a multimodal model, which training on text does
            not use, are frozen; see ``freeze_towers``. A model of text alone has none.

    Returns:
        The model in ``train()`` mode; ``model.load_report`` is the ``LoadReport``.

    Raises:
        CheckpointFormatError: If the checkpoint is damaged, unsafe or does not fit.
        ValueError: If an argument is out of range.
        UnsupportedModelError: If rows cannot be added for ``new_vocab_size`` tokens, or the adapters can only
            be initialised from the base weights.

    Collective: all ranks of the mesh, which are all ranks of the job.
    Memory: The shards, and the buffers of ``load_weights``.

    Example:
        >>> model = fs.load_pretrained(path, mesh=mesh, sac_ratio="1/2")
        >>> model.training, next(model.parameters()).dtype
        (True, torch.float32)
        >>> model.load_report.loaded[0]
        'model.embed_tokens.weight'
    """
    check_dtypes(master_dtype=master_dtype)
    check_frozen_dtype(frozen_dtype)
    folder = resolve_folder(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    checkpoint = Checkpoint(str(folder))
    with agreed("building the model"):
        model: Any = build(
            checkpoint,
            dtype=master_dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            new_vocab_size=new_vocab_size,
        )
        # That of a folder is absolute; a model of the Hub keeps its own, and not its snapshot's.
        model.name_or_path = model.config.name_or_path = (
            model.name_or_path if os.path.isdir(os.path.expanduser(name_or_path)) else os.fspath(name_or_path)
        )
        towers = freeze_towers_of(model) if freeze_towers else []
        if peft_config is not None:
            model = add_adapters(model, peft_config)
        if sac_ratio:
            apply_sac(model, sac_ratio)
        if compile:
            compile_blocks(model)
    if frozen_dtype is None and (towers or peft_config is not None):
        frozen_dtype = mp_policy.param_dtype if mp_policy is not None else torch.bfloat16
    shard_model(
        model,
        mesh=mesh,
        master_dtype=master_dtype,
        frozen_dtype=frozen_dtype,
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
    )
    model.load_report = _load(model, checkpoint, missing="error", unexpected="error", seed=0)
    return model.train()  # type: ignore[no-any-return]

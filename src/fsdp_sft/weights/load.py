"""Loading a Hugging Face checkpoint into a model: plan, agreement between ranks, reads, report."""

import os
import socket
import time
from typing import Any, Literal

from torch import nn

from fsdp_sft._model.adapters import refuse_initialised_from_base, without_adapters
from fsdp_sft._model.sharded import reshard
from fsdp_sft._model.wrappers import base_of, inner_model, is_transformers
from fsdp_sft._process.words import answered
from fsdp_sft._ranks.agree import agreed, all_gather_objects, difference, is_distributed
from fsdp_sft._ranks.launch import own_share
from fsdp_sft._tensors.boxes import replicate_dims
from fsdp_sft._tensors.reader import MAX_WORKERS
from fsdp_sft.errors import CheckpointFormatError
from fsdp_sft.weights.account import account
from fsdp_sft.weights.fill import Reading, fill
from fsdp_sft.weights.finish import make_ties
from fsdp_sft.weights.hub import resolve_folder
from fsdp_sft.weights.plan import LoadPlan, make_plan
from fsdp_sft.weights.report import LoadReport
from fsdp_sft.weights.resolve import open_checkpoint

Strategy = Literal["auto", "slice", "exchange"]
_MIN_BUDGET_BYTES = 1 << 16


@answered
def load_weights(
    model: nn.Module,
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    variant: str | None = None,
    strategy: Strategy = "auto",
    host_budget_bytes: int = 1 << 30,
    missing: Literal["error", "initialise"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    seed: int = 0,
    allow_pickle: bool = False,
    check_finite: bool = True,
) -> LoadReport:
    """Stream a safetensors checkpoint into a model's shards, casting each piece on its way.

    Every parameter and buffer ends up bitwise as plain ``from_pretrained`` would have it: transformers' own
    renames and conversions are applied, computed buffers are recomputed, and ties are kept. A rank reads only
    the bytes that its shards are made of. Parameters keep their dtype and ``requires_grad``, and the model
    keeps its mode.

    Args:
        model: Model from ``build_meta_model``, usually after ``shard_model``; on the meta device or not. With
            adapters, its base model is loaded, and ``modules_to_save`` are copied from it.
        name_or_path: A folder, or a Hub id.
        revision: Branch, tag or commit of a Hub id.
        variant: Variant of the weight files, such as ``"fp16"`` for ``model.fp16.safetensors``.
        strategy: ``"slice"``: every rank reads its own shards. ``"exchange"``: one of several replicas reads
            and the others receive, and one rank reads tensors that must be converted as a whole. ``"auto"``
            chooses.
        host_budget_bytes: Bytes that all read buffers together may take on the host.
        missing: What to do about keys that the checkpoint lacks: ``"error"``, or ``"initialise"`` to fill
            them with the model's own initialisation, the same on all ranks.
        unexpected: What to do about keys that the model lacks: ``"error"`` or ``"ignore"``.
        seed: Seed of that initialisation.
        allow_pickle: Whether a ``pytorch_model.bin`` may be read where there are no safetensors. Its tensors
            are read by position, and no code in the pickle is run.
        check_finite: Whether NaN and infinity among a parameter's values are an error. False loads them, for
            a model that is to be examined or repaired afterwards.

    Returns:
        What was read, from where, and how long it took.

    Raises:
        CheckpointFormatError: If the checkpoint is damaged, unsafe or does not fit the model; it has the
            names of what is missing or unexpected.
        CheckpointMismatchError: If the model has a tensor on the meta device that nothing has values for,
            such as adapters that ``peft.get_peft_model`` made there. Nothing has been read then.
        UnsupportedModelError: If the adapters were initialised from other base weights.
        ValueError: If an argument is out of range.
        TypeError: If the model is none of transformers; if it has one inside, the message names it.

    Collective: all ranks. An error on one is raised on all.
    Memory: The shards. On the host a read buffer of about 1 MiB for each of at most 4 threads, or for an
        accelerator two pinned buffers of 8 MiB (within ``host_budget_bytes``); the largest group of tensors
        that must be converted as a whole; and the keys that are initialised. On an accelerator, beside the
        shards, at most two pieces of 8 MiB per thread, with replicas one of 16 MiB, and for tied tensors that
        must be converted as a whole a second shard.

    Example:
        >>> model = fs.build_meta_model(path)
        >>> shards = fs.shard_model(model, mesh=mesh)
        >>> report = fs.load_weights(model, path)
        >>> report.missing, report.unexpected, report.strategy
        ([], [], 'slice')
    """
    _check_arguments(strategy, host_budget_bytes, missing, unexpected)
    _check_model(model)
    started = time.perf_counter()
    reshard(model)
    folder = resolve_folder(name_or_path, revision=revision, variant=variant, allow_pickle=allow_pickle)
    with agreed("planning the load"):
        refuse_initialised_from_base(model)
        with without_adapters(model) as base:
            make_ties(base)
            checkpoint = open_checkpoint(folder, variant, allow_pickle=allow_pickle)
            plan = make_plan(base, checkpoint, missing=missing, unexpected=unexpected)
            digest = plan.digest(checkpoint)
        sources = account(model, plan)
    told = {
        "strategy": strategy,
        "missing": missing,
        "unexpected": unexpected,
        "seed": seed,
        "check_finite": check_finite,
    }
    workers = _agree_on_plan(digest, str(folder), told)
    chosen, reason = choose_strategy(model, plan, strategy)
    reading = Reading(chosen, host_budget_bytes, workers, check_finite, seed)
    return fill(
        model,
        plan,
        checkpoint,
        sources,
        reading,
        reason=reason,
        checkpoint_bytes=checkpoint.total_bytes,
        started=started,
    )


def choose_strategy(model: nn.Module, plan: LoadPlan, strategy: Strategy) -> tuple[str, str]:
    """The strategy (``"slice"`` or ``"exchange"``), and the reason for it in words."""
    if strategy != "auto":
        return strategy, "as asked"
    if not is_distributed():
        return "slice", "one process reads everything"
    replicated = next((found for p in model.parameters() if (found := replicate_dims(p))), None)
    if replicated is not None:
        mesh, dims = replicated
        return "exchange", f"{mesh.size(dims[0])} replicas: one reads each tensor and the others receive it"
    if plan.groups:
        converted = plan.class_bytes["other"] / 1e6
        return "exchange", f"{converted:.1f} MB must be converted whole: one rank reads each group"
    return "slice", "no replicas and nothing to convert whole: each byte is read once"


def _check_arguments(strategy: str, host_budget_bytes: int, missing: str, unexpected: str) -> None:
    """Refuse arguments that are out of range."""
    for name, value, allowed in (
        ("strategy", strategy, ("auto", "slice", "exchange")),
        ("missing", missing, ("error", "initialise")),
        ("unexpected", unexpected, ("error", "ignore")),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    if isinstance(host_budget_bytes, bool) or host_budget_bytes < _MIN_BUDGET_BYTES:
        raise ValueError(f"host_budget_bytes must be at least {_MIN_BUDGET_BYTES}, got {host_budget_bytes!r}")


def _check_model(model: nn.Module) -> None:
    """Refuse models that are not of transformers."""
    base = base_of(model)
    if not is_transformers(base):
        raise TypeError(
            f"load_weights loads a transformers model, got {type(base).__name__.removeprefix('FSDP')}"
            f"{inner_model(base)}; load_full_state_dict reads a module of one's own"
        )


def _agree_on_plan(digest: str, folder: str, told: dict[str, Any]) -> int:
    """Check that all ranks have the same plan and arguments; the number of threads for this rank's reads.

    Args:
        digest: This rank's ``LoadPlan.digest``.
        folder: Folder of the checkpoint, for the error.
        told: Arguments of the load that must be the same on all ranks, by name.

    Collective: all ranks.
    """
    cpus = os.sched_getaffinity(0)
    seen = all_gather_objects((digest, socket.gethostname(), sum(1 << cpu for cpu in cpus), told))
    apart = difference([(rank, theirs) for rank, (*_, theirs) in enumerate(seen)])
    if apart:
        raise ValueError(f"ranks load with different arguments: {apart}")
    different = [rank for rank, (other, *_) in enumerate(seen) if other != seen[0][0]]
    if different:
        raise CheckpointFormatError(
            f"ranks {different[:8]} see another checkpoint in {folder} than rank 0; is every node's copy the "
            "same?"
        )
    neighbours = [mask for _, host, mask, _ in seen if host == socket.gethostname()]
    return max(1, min(MAX_WORKERS, own_share(cpus, neighbours)))

"""Shard a model with FSDP2 block by block, its masters made from each shard alone; a table of the groups."""

import functools
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from fsdp_sft._model.blocks import find_blocks
from fsdp_sft._model.published import copied_modules
from fsdp_sft._model.sharded import mesh_of, refuse_hooks
from fsdp_sft._model.twin import keep_config, refuse_quantised_model
from fsdp_sft._model.view import base_of, original_class, record_of, replicas_of, reshard
from fsdp_sft._process.devices import check_dtypes
from fsdp_sft._ranks.agree import tell
from fsdp_sft._ranks.mesh import build_mesh, mesh_of_job, parameter_mesh
from fsdp_sft._tensors.boxes import box_of, check_ranks_ascend, local_of, memory_of
from fsdp_sft.attention.hybrid import separate_rows
from fsdp_sft.errors import UnsupportedModelError, abridged
from fsdp_sft.sac import refuse_inner_groups
from fsdp_sft.sac.attach import checkpointed
from fsdp_sft.shard.expert_parallel import place_experts
from fsdp_sft.shard.float32_modules import follow_plain_dtypes
from fsdp_sft.shard.packing import check_frozen_dtype, choose_packed, pack_loaded
from fsdp_sft.shard.units import (
    cast_shards,
    innermost,
    reshard_together,
    shard_unit,
    units_of,
    without_indices,
)

Model = TypeVar("Model", bound=nn.Module)
_logger = logging.getLogger(__name__)


def shard_model(
    model: Model,
    *,
    mesh: DeviceMesh | None = None,
    master_dtype: torch.dtype = torch.float32,
    frozen_dtype: torch.dtype | str | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    blocks: Mapping[str, nn.Module] | None = None,
    reshard_after_forward: bool | int = True,
    offload_policy: OffloadPolicy | None = None,
    ep_size: int = 1,
) -> Model:
    """Shard a model in place by FSDP2 groups: one for each block, embedding, head; the root has the rest.

    Each shard is cast after its block has been split, so a rank casts 1/N of the bytes and never holds a
    block in the master dtype. An embedding and a head that are tied, or whose weight the model uses without
    calling them, lie in the root's group, which stays gathered for the whole step. Parameters that plain
    transformers keeps in float32 under the policy's compute dtype compute in float32 here, gathered beside
    the others of their group; a warning names those that it keeps so under float16 alone. Other
    floating-point buffers of transformers models take the dtype that they have in a plain model of the
    compute dtype. Blocks of such models do not cast their inputs, because plain models do not either.

    A parameter is sharded along its first dimension. If that would give some rank more than 1.05 times the
    mean, it is sharded along the first dimension whose size the number of ranks divides; 8 experts thus lie
    evenly on 64 ranks. FSDP2 copies such a parameter, and its gradient, once more. Where shards are uneven,
    rank 0 has the most.

    A model whose groups the caller has made with ``fully_shard`` needs no call of this: ``train_step``,
    ``evaluate``, checkpoints and exports take it as it is.

    Args:
        model: Model with ordinary parameters, materialised (with the same values on every rank) or on the
            meta device.
        mesh: Mesh from ``build_mesh``: 1-D for FSDP, 2-D for HSDP and DDP. None takes the one that was made,
            or else all ranks (FSDP). If it has ``cp``, parameters are sharded over the ranks of ``dp_shard``
            and ``cp`` together.
        master_dtype: Dtype of the stored trainable shards, and so of gradients and optimizer states.
        frozen_dtype: Dtype of the stored frozen shards; None keeps the dtype that they have. ``"stored"``
            keeps the matrices of blocks as a quantised checkpoint has them, and ``"nf4"`` or ``"fp8"`` packs
            them while they are loaded: ranks gather packed bytes, and compute with the values. Modules that
            peft's ``modules_to_save`` were copied from get ``master_dtype``, because the copies take their
            first values from them.
        mp_policy: Compute and reduction dtypes; None is bfloat16 compute with float32 reduction, and
            ``MixedPrecisionPolicy()`` computes in float32.
        blocks: Blocks by FQN, which may be nested; None takes ``find_blocks(model)``.
        reshard_after_forward: What becomes of a block's gathered parameters after its forward. True frees
            them (ZeRO-3), False keeps them until its backward (ZeRO-2), and a number keeps them sharded over
            that many ranks. The root keeps torch's default: it stays gathered from forward to backward. With
            a number, blocks are sharded along first dimensions only, as FSDP2's smaller mesh requires.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer states on the host.
            Pinned memory is turned off if there is no accelerator to copy to.
        ep_size: Number of ranks among which the experts of a mixture on the meta device are divided (expert
            parallelism): each has some of them whole and reads no others, and tokens travel to the ranks that
            have their experts. It must divide ``dp_shard`` and the number of experts. 1 shards experts like
            all other parameters, which are gathered on the ranks that have the tokens.

    Returns:
        The same model.

    Raises:
        ValueError: If the model is sharded already, an argument is out of range, or a block is not part of
            this model.
        UnsupportedModelError: If ``blocks`` is None and none is found, if a trained parameter has hooks,
            which would not run, if transformers holds the weights quantised, if it has no plan to divide
            experts among ``ep_size`` ranks or they have adapters, or, after ``apply_sac(save=)``, if a part
            of a block is sharded as a group of its own, as these experts are. If it is inside
            DistributedDataParallel.

    Collective: all ranks of the mesh, with the same model.
    Memory: For a materialised model, its memory, which falls to that of the shards, plus one block at a time.

    Example:
        >>> model = fs.build_meta_model(path)
        >>> model = fs.shard_model(model, mesh=mesh, master_dtype=torch.float32)
        >>> report = fs.load_weights(model, path)
    """
    check_dtypes(master_dtype=master_dtype)
    check_frozen_dtype(frozen_dtype)
    if replicas_of(model) is not None:
        raise UnsupportedModelError(
            "the model is inside DistributedDataParallel already; shard the model that it was made of, on "
            "build_mesh(dp_replicate=...) if whole replicas are wanted"
        )
    sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if sharded:
        raise ValueError(f"{sharded[0]} is sharded already; shard_model works once, on ordinary parameters")
    base = base_of(model)
    keep_config(base)
    refuse_quantised_model(model)
    refuse_hooks(model, are_shards=False)
    given = mesh if mesh is not None else mesh_of_job() or build_mesh()
    mesh = parameter_mesh(given)
    policy = mp_policy or MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check_ranks_ascend(mesh, [Shard(0)] * mesh.ndim)
    chosen = dict(find_blocks(model) if blocks is None else blocks)
    inside = {id(module) for module in model.modules()}
    strange = [fqn for fqn, block in chosen.items() if id(block) not in inside]
    if strange:
        raise ValueError(
            f"blocks {abridged(strange)} are not modules of this {type(model).__name__}, whose weights "
            "would be gathered all at once: pass what find_blocks(model, ...) returned"
        )
    offload = offload_policy or OffloadPolicy()
    if isinstance(offload, CPUOffloadPolicy) and not torch.accelerator.is_available():
        offload = CPUOffloadPolicy(pin_memory=False)
    placed = place_experts(model, given, ep_size, policy.reduce_dtype or policy.param_dtype or master_dtype)
    copied = copied_modules(model)
    kept = follow_plain_dtypes(model, policy.param_dtype, warn=mesh.get_rank() == 0)
    by_rows = choose_packed(model, chosen, frozen_dtype, kept, reshard_after_forward)
    frozen = policy.param_dtype if isinstance(frozen_dtype, str) else frozen_dtype
    units = units_of(model, chosen, kept, policy, reshard_after_forward, placed)
    for unit in units:
        shard_unit(unit, mesh, offload, by_rows, kept)
        for module in unit.modules:
            cast_shards(module, master_dtype, frozen, copied)
    if base is not model and hasattr(model, "generate"):
        # peft's generate calls the base model, and so bypasses the root, which gathers its parameters.
        register_fsdp_forward_method(model, "generate")
    beside = [module for unit in units if unit.beside_root for module in unit.modules]
    model.__dict__["reshard"] = functools.partial(reshard_together, model, *beside)
    separate_rows(model)
    record_of(model).mesh = given
    for each in (model, base):
        for name, instead in _INSTEAD.items():
            if callable(getattr(each, name, None)):
                each.__dict__[name] = functools.partial(instead, each)
    pack_loaded(model)
    tell(
        _logger,
        "sharded %s: %d FSDP2 groups over %d ranks%s, %s parameters, computing in %s",
        original_class(base).__name__,
        sum(isinstance(module, FSDPModule) for module in model.modules()),
        mesh.size(mesh.ndim - 1),
        f" in each of {mesh.size(0)} replicas" if mesh.ndim > 1 else "",
        "/".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})),
        str(policy.param_dtype).removeprefix("torch."),
    )
    refuse_inner_groups(model, checkpointed(model).kept)  # before weights are loaded
    return model


# Methods of transformers and peft that cannot be done with shards refuse it, before they write.


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
    given = kwargs.get("state_dict")
    if given is None or any(isinstance(value, DTensor) for value in given.values()):
        raise UnsupportedModelError(
            "save_pretrained would write one rank's shards. On all ranks call export_hf(model, folder, "
            "tokenizer=...), or export_adapter(model, folder) for the adapter alone; nothing was written"
        )
    return type(model).save_pretrained(model, *args, **kwargs)


def _resize_token_embeddings(model: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
    if new_num_tokens is None:
        return model.get_input_embeddings()
    raise UnsupportedModelError(
        "a sharded model gets no more tokens: build it with new_vocab_size=, which build_meta_model and "
        "load_pretrained take"
    )


_INSTEAD = {"save_pretrained": _save_pretrained, "resize_token_embeddings": _resize_token_embeddings}


# What became of it, as a table.


def describe_sharding(model: nn.Module) -> str:
    """A table of the FSDP2 groups: FQN, parameters, local bytes, dtypes, placements.

    Of weights that are packed the table has the format in place of the dtype, and a line says how many bits a
    value takes on this rank, with its scales and with what fills shards up to equal parts. Where shards are
    uneven, rank 0 has the most.

    Groups that differ in their index only share a row, which names the first and the last. The model is
    resharded first.

    Args:
        model: Sharded model.

    Returns:
        The table as text, with a summary in its last line.

    Raises:
        ValueError: If the model is not sharded.

    Example:
        >>> print(fs.describe_sharding(model))
        group                              x  parameters  trainable  local bytes  dtype    placements
        (root)                             1  33,536      33,536     134,144      float32  (Shard(dim=0),)
        model.layers.0 ... model.layers.3  4  197,120     197,120    788,480      float32  (Shard(dim=0),)
        822,016 parameters, 3,288,064 bytes on this rank, mesh (dp_shard=1) on cpu
    """
    mesh = mesh_of(model)
    if mesh is None:
        raise ValueError(f"{type(model).__name__} is not sharded; call shard_model first")
    reshard(model)
    sharded = [fqn for fqn, module in model.named_modules() if isinstance(module, FSDPModule)]
    groups: dict[str, list[nn.Parameter]] = {fqn: [] for fqn in sharded}
    for name, parameter in model.named_parameters():
        groups[innermost(name, sharded)].append(parameter)
    rows: dict[tuple[str, ...], list[str]] = {}
    for fqn, own in groups.items():
        row = (
            without_indices(fqn),
            f"{sum(p.numel() for p in own):,}",
            f"{sum(p.numel() for p in own if p.requires_grad):,}",
            f"{sum(memory_of(p).nbytes for p in own):,}",
            ", ".join(sorted({_form(p) for p in own})),
            ", ".join(sorted({str(getattr(p, "placements", "not sharded")) for p in own})),
        )
        if own:
            rows.setdefault(row, []).append(fqn or "(root)")
    table: list[tuple[str, ...]] = [
        ("group", "x", "parameters", "trainable", "local bytes", "dtype", "placements")
    ]
    for cells, fqns in rows.items():
        names = fqns[0] if len(fqns) == 1 else f"{fqns[0]} ... {fqns[-1]}"
        table.append((names, str(len(fqns)), *cells[1:]))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
    axes = ", ".join(f"{n}={s}" for n, s in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    everything = [parameter for own in groups.values() for parameter in own]
    lines.append(
        f"{sum(p.numel() for p in everything):,} parameters, "
        f"{sum(memory_of(p).nbytes for p in everything):,} bytes on this rank, mesh ({axes}) on "
        f"{mesh.device_type}"
    )
    packed = [parameter for parameter in everything if hasattr(local_of(parameter), "format")]
    if packed:
        bits = 8 * sum(memory_of(parameter).nbytes for parameter in packed)
        values = sum(box_of(parameter).numel for parameter in packed)
        lines.append(f"packed: {len(packed)} weights, {bits / max(1, values):.2f} bits a value on this rank")
    return "\n".join(lines)


def _form(parameter: nn.Parameter) -> str:
    """The format of a packed parameter, or its dtype."""
    local = local_of(parameter)
    return str(getattr(local, "format", local.dtype)).removeprefix("torch.")

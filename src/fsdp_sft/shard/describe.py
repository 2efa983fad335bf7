"""A table of a sharded model's FSDP2 groups."""

import math

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_sft._model.sharded import mesh_of, reshard
from fsdp_sft._tensors.boxes import local_of
from fsdp_sft._tensors.packed_shard import PackedShard, bits_of
from fsdp_sft.errors import abridged
from fsdp_sft.shard.names import innermost, without_indices


def describe_sharding(model: nn.Module) -> str:
    """A table of the FSDP2 groups: FQN, parameters, local bytes, dtypes, placements.

    Of weights that are packed the table has the format in place of the dtype, and a line says how many bits a
    value takes on this rank, with its scales and with what fills shards up to equal parts, and what is frozen
    and not packed.

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
        822,016 parameters, 3,288,064 bytes on this rank, ... mesh (dp_shard=1) on cpu
    """
    mesh = mesh_of(model)
    if mesh is None:
        raise ValueError(f"{type(model).__name__} is not sharded; call shard_model first")
    reshard(model)
    rows: dict[tuple[str, ...], list[str]] = {}
    total_local = total = 0
    for fqn, parameters in _groups(model).items():
        local = sum(bits_of(p).nbytes for p in parameters)
        numel = sum(p.numel() for p in parameters)
        total, total_local = total + numel, total_local + local
        dtypes = ", ".join(sorted({_form(p) for p in parameters}))
        placements = ", ".join(
            sorted({str(p.placements) if isinstance(p, DTensor) else "not sharded" for p in parameters})
        )
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        row = (without_indices(fqn), f"{numel:,}", f"{trainable:,}", f"{local:,}", dtypes, placements)
        rows.setdefault(row, []).append(fqn or "(root)")
    header: tuple[str, ...] = ("group", "x", "parameters", "trainable", "local bytes", "dtype", "placements")
    table = [header]
    for cells, fqns in rows.items():
        names = fqns[0] if len(fqns) == 1 else f"{fqns[0]} ... {fqns[-1]}"
        table.append((names, str(len(fqns)), *cells[1:]))
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
    axes = ", ".join(f"{n}={s}" for n, s in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    fullest = _fullest_over_mean(model)
    summary = (
        f"{total:,} parameters, {total_local:,} bytes on this rank, the fullest rank has {fullest:.2f} times "
        f"the mean, mesh ({axes}) on {mesh.device_type}"
    )
    return "\n".join([line.rstrip() for line in lines] + [summary, *_of_packed(model)])


def _form(parameter: nn.Parameter) -> str:
    """The format of a packed parameter, or its dtype."""
    local = local_of(parameter)
    if isinstance(local, PackedShard):
        return local.lies.form.name
    return str(parameter.dtype).removeprefix("torch.")


def _of_packed(model: nn.Module) -> list[str]:
    """Lines about packed weights: what a value takes, and which frozen ones are not packed."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    shards = [shard for p in frozen.values() if isinstance(shard := local_of(p), PackedShard)]
    if not shards:
        return []
    values = sum(shard.count * math.prod(shard.shape[1:]) for shard in shards)
    taken = sum(shard.rows.numel() for shard in shards)
    others = {without_indices(n): p for n, p in frozen.items() if not isinstance(local_of(p), PackedShard)}
    largest = sorted(others, key=lambda name: -others[name].numel())
    return [
        f"packed: {len(shards)} weights, {taken * 8 / max(1, values):.2f} bits a value on this rank; frozen "
        f"and not packed, as embeddings, heads, routers, norms and small matrices are: {abridged(largest)}"
    ]


def _groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of each FSDP2 module, without those of FSDP2 modules inside of it, by its FQN."""
    sharded = [fqn for fqn, module in model.named_modules() if isinstance(module, FSDPModule)]
    groups: dict[str, list[nn.Parameter]] = {fqn: [] for fqn in sharded}
    for name, parameter in model.named_parameters():
        groups[innermost(name, sharded)].append(parameter)
    return {fqn: parameters for fqn, parameters in groups.items() if parameters}


def _fullest_over_mean(model: nn.Module) -> float:
    """Elements of the fullest rank, padding included, divided by the mean."""
    padded = total = 0
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            continue
        shape, ranks = list(parameter.shape), 1
        cuts = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        for size, cut in reversed(list(cuts)):  # experts are divided by a later axis before FSDP2 shards them
            if not cut.is_replicate():
                dim = cut.dim  # type: ignore[attr-defined]
                shape[dim], ranks = -(-shape[dim] // size), ranks * size
        padded, total = padded + math.prod(shape) * ranks, total + parameter.numel()
    return padded / (total or 1)

"""A table of a sharded model's FSDP2 groups."""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_sft._model.sharded import mesh_of, reshard
from fsdp_sft.shard.packing import bytes_of, form_of, summary_of
from fsdp_sft.shard.units import innermost, without_indices


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
            f"{sum(map(bytes_of, own)):,}",
            ", ".join(sorted(set(map(form_of, own)))),
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
        f"{sum(map(bytes_of, everything)):,} bytes on this rank, mesh ({axes}) on "
        f"{mesh.device_type}"
    )
    return "\n".join([*lines, *summary_of(everything)])

"""Which frozen weights a model keeps packed, the swap of their shards, and what a table says of them."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_sft._compat.fsdp import adopt_shards, put_shard, split_factor_of
from fsdp_sft._model.adapters import copied_modules, without_adapters
from fsdp_sft._model.blocks import text_blocks
from fsdp_sft._model.view import base_of, kept_of, record_of, slot
from fsdp_sft._process.devices import check_dtypes
from fsdp_sft._quantised.recipes import RECIPES
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._ranks.agree import all_reduce_sum
from fsdp_sft._tensors.boxes import box_of, local_of
from fsdp_sft._tensors.packed_shard import PackedLayout, PackedShard, RowFormat, bits_of
from fsdp_sft._tensors.sharding import own_part

STORED = "stored"
KINDS = (STORED, *RECIPES)
_MODULUS = 1 << 42  # a power of two, as sums wrap around at one; exact as floats of 1,000 ranks
_WORDS_AT_ONCE = 1 << 20
_NARROWEST = 32  # columns: what has fewer is no matrix of a layer


@dataclass(frozen=True)
class PackedWeights:
    """What is remembered of a model whose frozen weights are packed, or will be when they are loaded.

    Attributes:
        kind: ``"stored"``, or the name of a recipe.
        names: Names of the parameters in the base model.
    """

    kind: str
    names: frozenset[str]


def packed_weights(model: nn.Module) -> PackedWeights | None:
    """The weights of a model that are packed, or will be; None if there are none."""
    return kept_of(base_of(model), PackedWeights)


def check_frozen_dtype(frozen_dtype: torch.dtype | str | None) -> None:
    """Raise for what is neither a floating-point dtype nor a way to keep frozen weights packed; None passes.

    Raises:
        ValueError: With what can be given.
    """
    if not isinstance(frozen_dtype, str):
        check_dtypes(frozen_dtype=frozen_dtype)
    elif frozen_dtype not in KINDS:
        raise ValueError(f"frozen_dtype must be a torch.dtype, or one of {KINDS}; got {frozen_dtype!r}")


def packed_digest(model: nn.Module) -> dict[str, str] | None:
    """How a model's frozen weights are packed, and a fingerprint of their bytes; None without any.

    Returns:
        ``kind``: ``"stored"``, or the name of a recipe. ``digest``: SHA-256 of sums over the bytes of all
        rows, which is the same on any number of ranks.

    Collective: all ranks.
    """
    weights, shards = packed_weights(model), {}
    for name, parameter in base_of(model).named_parameters():
        if isinstance(local := local_of(parameter), PackedShard):
            shards[name] = (parameter, local)
    if weights is None or not shards:
        return None
    own = [0.0 if own_part(p) is None else float(_sum(p, local)) for p, local in shards.values()]
    sums = [int(total) % _MODULUS for total in all_reduce_sum(own)]
    forms = [local.lies.form.name for _, local in shards.values()]
    text = json.dumps([weights.kind, list(zip(shards, forms, sums, strict=True))])
    return {"kind": weights.kind, "digest": hashlib.sha256(text.encode()).hexdigest()}


def _sum(parameter: nn.Parameter, shard: PackedShard) -> int:
    """The bytes of this rank's rows, each word weighted by its place in the whole parameter."""
    words = shard.own_rows.view(torch.int32)
    first = box_of(parameter).offset[0] * shard.lies.rows_each
    device, total = words.device, 0
    across = torch.arange(words.shape[1], device=device) * 2654435761 * 2 + 1
    for begin in range(0, len(words), step := max(1, _WORDS_AT_ONCE // words.shape[1])):
        some = words[begin : begin + step].to(torch.int64)
        down = (torch.arange(len(some), device=device) + first + begin) * 40503 * 2 + 1
        total += int(((some * across).sum(1) * down).sum()) % _MODULUS  # integers that overflow wrap around
    return total % _MODULUS


def choose_packed(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    frozen_dtype: torch.dtype | str | None,
    kept: Collection[int],
    reshard: bool | int,
) -> set[int]:
    """Choose the frozen weights that are kept packed, and remember them.

    Args:
        model: Model that is not sharded yet.
        blocks: Its blocks, by FQN.
        frozen_dtype: How it is to keep what is frozen; if that is a dtype, nothing is packed.
        kept: Ids of the parameters that compute in float32. They are not packed, which would round them.
        reshard: What becomes of a block's gathered parameters after its forward.

    Returns:
        The ids of the parameters.

    Raises:
        ValueError: If nothing is frozen, nothing says how the checkpoint is quantised, or gathered parameters
            are to be sharded again over some of the ranks.
    """
    if not isinstance(frozen_dtype, str):
        return set()
    if type(reshard) is int:
        raise ValueError(
            f"reshard_after_forward={reshard} keeps gathered values sharded, which torch does not do for "
            f"weights that are packed (frozen_dtype={frozen_dtype!r}): take True or False"
        )
    with without_adapters(model) as base:
        named = dict(base.named_parameters(remove_duplicate=False))
    if frozen_dtype == STORED and kept_of(base, Settings) is None:
        raise ValueError(
            "frozen_dtype='stored' keeps weights as a quantised checkpoint has them, and this model was not "
            f"built from one by build_meta_model: take a dtype, or {' or '.join(map(repr, RECIPES))}"
        )
    spared = {id(p) for module in copied_modules(model) for p in module.parameters()} | set(kept)
    chosen = matrices_to_pack(named, text_blocks(model, blocks).values(), spared)
    if not chosen:
        raise ValueError(
            f"frozen_dtype={frozen_dtype!r} is for frozen weights, and no matrix in a block is frozen: give "
            "a peft_config, or freeze what is not trained before shard_model"
        )
    record_of(base).keep(PackedWeights(frozen_dtype, frozenset(chosen)))
    return {id(parameter) for parameter in chosen.values()}


def matrices_to_pack(
    named: Mapping[str, nn.Parameter], blocks: Iterable[nn.Module], spared: Collection[int] = ()
) -> dict[str, nn.Parameter]:
    """The frozen weights that can be kept packed: matrices and stacks of matrices, but for routers'.

    Args:
        named: All parameters of a model, tied ones by each of their names.
        blocks: Its blocks: what lies outside of them is not packed.
        spared: Ids of parameters that are not packed.
    """
    inside = {id(p) for block in blocks for p in block.parameters()}
    times = Counter(id(parameter) for parameter in named.values())
    experts = {parameter.shape[0] for parameter in named.values() if parameter.ndim == 3}
    return {
        name: parameter
        for name, parameter in named.items()
        if id(parameter) in inside
        and id(parameter) not in spared
        and times[id(parameter)] == 1
        and _is_matrix(parameter, experts)
    }


def _is_matrix(parameter: nn.Parameter, experts: Collection[int]) -> bool:
    """Whether a parameter is a frozen matrix, or a stack of them, and no router's."""
    if parameter.requires_grad or not parameter.is_floating_point() or parameter.ndim not in (2, 3):
        return False
    shape = parameter.shape
    is_router = parameter.ndim == 2 and (shape[0] in experts or shape[0] == 1)
    return min(shape[-2:]) >= _NARROWEST and shape[-1] % 2 == 0 and not is_router


def layout_of(parameter: DTensor, form: RowFormat, transposed: bool) -> PackedLayout:
    """How a sharded parameter lies in rows of that format, among the ranks that gather it."""
    first, *others = parameter.shape
    return PackedLayout(form, (first // _cut_before(parameter), *others), transposed)


def empty_shard(parameter: DTensor, layout: PackedLayout, device: torch.device) -> PackedShard:
    """A shard of packed bytes for a parameter, not filled yet."""
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    parts = math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))
    size = layout.shard_rows(parts // _cut_before(parameter)), layout.form.row_bytes
    rows = torch.zeros(size, dtype=torch.uint8, device=device)
    return PackedShard(rows, layout, box_of(parameter).shape[0], parameter.dtype)


def _cut_before(parameter: DTensor) -> int:
    """Number of parts, each sharded by FSDP2 among its own ranks, as experts that ranks share out are."""
    return math.prod(split_factor_of(placement) or 1 for placement in parameter.placements)


@torch.no_grad()
def pack_loaded(model: nn.Module) -> None:
    """Pack the shards that have memory, of weights that are to be packed by a recipe and are not yet."""
    weights = packed_weights(model)
    if weights is None or weights.kind == STORED:
        return
    with without_adapters(model) as base:
        for name in sorted(weights.names):
            parameter = base.get_parameter(name)
            own = local_of(parameter)
            if isinstance(parameter, DTensor) and not (own.is_meta or isinstance(own, PackedShard)):
                form = RECIPES[weights.kind].form(own.shape[-1])
                shard = empty_shard(parameter, layout_of(parameter, form, transposed=False), own.device)
                fill_packed(shard, own)
                put_shard(*slot(base, name), shard)
    adopt_shards(model)


def fill_packed(shard: PackedShard, values: torch.Tensor) -> None:
    """Pack a shard's values into its rows, about four million at a time."""
    form = shard.lies.form
    recipe, step = RECIPES[form.name], max(1, (1 << 22) // form.width)
    flat = values.reshape(-1, form.width)
    for first in range(0, len(flat), step):
        some = flat[first : first + step].to(torch.float32)
        shard.own_rows[first : first + step].copy_(form.joined(recipe.pack(some), len(some)))


# What a table of shards says of parameters, packed or not.


def bytes_of(parameter: nn.Parameter) -> int:
    """Bytes of this rank's shard."""
    return bits_of(parameter).nbytes


def form_of(parameter: nn.Parameter) -> str:
    """The format of a packed parameter, or its dtype."""
    local = local_of(parameter)
    return local.lies.form.name if isinstance(local, PackedShard) else str(local.dtype).removeprefix("torch.")


def summary_of(parameters: Iterable[nn.Parameter]) -> list[str]:
    """A line on this rank's packed shards; none if there are none."""
    packed = [shard for p in parameters if isinstance(shard := local_of(p), PackedShard)]
    bits = 8 * sum(shard.rows.numel() for shard in packed)
    values = sum(shard.count * math.prod(shard.shape[1:]) for shard in packed)
    line = f"packed: {len(packed)} weights, {bits / max(1, values):.2f} bits a value on this rank"
    return [line] if packed else []

"""Which frozen weights a model keeps packed, and the swap of their shards."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_sft._compat.fsdp import adopt_shards, put_shard
from fsdp_sft._model.adapters import copied_modules, without_adapters
from fsdp_sft._model.towers import frozen_towers, pattern_of
from fsdp_sft._model.view import base_of, kept_of, record_of, slot
from fsdp_sft._process.words import check_dtypes
from fsdp_sft._quantised.recipes import RECIPES
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._ranks.agree import all_reduce_sum
from fsdp_sft._ranks.mesh import EP
from fsdp_sft._tensors.boxes import box_of, local_of
from fsdp_sft._tensors.packed_shard import PackedLayout, PackedShard, RowFormat
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


@dataclass(frozen=True)
class PackedDigest:
    """A fingerprint of packed weights.

    Attributes:
        kind: ``"stored"``, or the name of a recipe.
        digest: SHA-256 of sums over the bytes of all rows, which is the same on any number of ranks.
        versions: By which a change of the bytes is noticed.
    """

    kind: str
    digest: str
    versions: tuple[tuple[int, int], ...]


def packed_weights(model: nn.Module) -> PackedWeights | None:
    """The weights of a model that are packed, or will be; None if there are none."""
    return kept_of(base_of(model), PackedWeights)


def packed_or_dtype(frozen_dtype: torch.dtype | str | None) -> tuple[str | None, torch.dtype | None]:
    """(a way to keep frozen weights packed, the dtype of frozen shards); one of the two is None.

    Raises:
        ValueError: If it is neither.
    """
    if not isinstance(frozen_dtype, str):
        check_dtypes(frozen_dtype=frozen_dtype)
        return None, frozen_dtype
    if frozen_dtype not in KINDS:
        raise ValueError(f"frozen_dtype must be a torch.dtype, or one of {KINDS}; got {frozen_dtype!r}")
    return frozen_dtype, None


def packed_digest(model: nn.Module) -> PackedDigest | None:
    """The fingerprint of a model's packed weights, anew if their bytes have changed; None without any.

    Collective: all ranks.
    """
    weights, shards, base = packed_weights(model), {}, base_of(model)
    for name, parameter in base.named_parameters():
        if isinstance(local := local_of(parameter), PackedShard):
            shards[name] = (parameter, local)
    if weights is None or not shards:
        return None
    versions = tuple((local.rows.data_ptr(), local.rows._version) for _, local in shards.values())
    known = kept_of(base, PackedDigest)
    is_known = known is not None and known.versions == versions
    if not all_reduce_sum([not is_known])[0]:
        return known
    own = [0.0 if own_part(p) is None else float(_sum(p, local)) for p, local in shards.values()]
    sums = [int(total) % _MODULUS for total in all_reduce_sum(own)]
    forms = [local.lies.form.name for _, local in shards.values()]
    text = json.dumps([weights.kind, list(zip(shards, forms, sums, strict=True))])
    found = PackedDigest(weights.kind, hashlib.sha256(text.encode()).hexdigest(), versions)
    record_of(base).keep(found)
    return found


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
    model: nn.Module, blocks: Mapping[str, nn.Module], kind: str, kept: Collection[int]
) -> set[int]:
    """Choose the frozen weights that are kept packed, and remember them; the ids of the parameters.

    Those of what computes in float32 (``kept``, by id) are not packed: they would be rounded.

    Raises:
        ValueError: If nothing is frozen, or nothing says how the checkpoint is quantised.
    """
    with without_adapters(model) as base:
        named = dict(base.named_parameters(remove_duplicate=False))
    if kind == STORED and kept_of(base, Settings) is None:
        raise ValueError(
            "frozen_dtype='stored' keeps weights as a quantised checkpoint has them, and this model was not "
            f"built from one by build_meta_model: take a dtype, or {' or '.join(map(repr, RECIPES))}"
        )
    spared = {id(p) for module in copied_modules(model) for p in module.parameters()} | set(kept)
    towers = pattern_of(frozen_towers(base))
    found = matrices_to_pack(named, blocks.values(), spared)
    chosen = {name: p for name, p in found.items() if not re.fullmatch(towers, name)}
    if not chosen:
        raise ValueError(
            f"frozen_dtype={kind!r} is for frozen weights, and no matrix in a block is frozen: give a "
            "peft_config, or freeze what is not trained before shard_model"
        )
    record_of(base).keep(PackedWeights(kind, frozenset(chosen)))
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
    mesh, shape = parameter.device_mesh, list(parameter.shape)
    if EP in (mesh.mesh_dim_names or ()):
        shape[0] //= mesh[EP].size()
    return PackedLayout(form, tuple(shape), transposed)


def empty_shard(parameter: DTensor, layout: PackedLayout, device: torch.device) -> PackedShard:
    """A shard of packed bytes for a parameter, not filled yet."""
    mesh = parameter.device_mesh
    sizes = zip(mesh.mesh_dim_names or (None,), mesh.shape, parameter.placements, strict=True)
    shards = math.prod(size for name, size, p in sizes if name != EP and not isinstance(p, Replicate))
    size = layout.shard_rows(shards), layout.form.row_bytes
    rows = torch.zeros(size, dtype=torch.uint8, device=device)
    return PackedShard(rows, layout, box_of(parameter).shape[0], parameter.dtype)


def put_packed(model: nn.Module, name: str, shard: PackedShard) -> None:
    """Replace the shard of a parameter of the base model by packed bytes."""
    module, leaf = slot(model, name)
    put_shard(module, leaf, shard)


@torch.no_grad()
def pack_loaded(model: nn.Module) -> None:
    """Pack the shards that have values already."""
    with without_adapters(model) as base:
        weights = kept_of(base, PackedWeights)
        assert weights is not None
        recipe = RECIPES[weights.kind]
        for name in sorted(weights.names):
            parameter = base.get_parameter(name)
            assert isinstance(parameter, DTensor)
            if parameter.is_meta:
                continue
            own = local_of(parameter)
            layout = layout_of(parameter, recipe.form(own.shape[-1]), transposed=False)
            shard = empty_shard(parameter, layout, own.device)
            fill_packed(shard, own)
            put_packed(base, name, shard)
    adopt_shards(model)


def fill_packed(shard: PackedShard, values: torch.Tensor) -> None:
    """Pack a shard's values into its rows, about four million at a time."""
    form = shard.lies.form
    recipe, step = RECIPES[form.name], max(1, (1 << 22) // form.width)
    flat = values.reshape(-1, form.width)
    for first in range(0, len(flat), step):
        some = flat[first : first + step].to(torch.float32)
        shard.own_rows[first : first + step].copy_(form.joined(recipe.pack(some), len(some)))

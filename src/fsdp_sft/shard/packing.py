"""Which frozen weights a model keeps packed, and the swap of their shards."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_sft._compat.fsdp import adopt_shards, put_shard, split_factor_of
from fsdp_sft._model.blocks import to_prepare
from fsdp_sft._model.published import copied_modules, published
from fsdp_sft._model.view import base_of, kept_of, record_of, slot
from fsdp_sft._process.devices import check_dtypes
from fsdp_sft._quantised.recipes import RECIPES
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._tensors.boxes import box_of, local_of
from fsdp_sft._tensors.packed import RowFormat
from fsdp_sft._tensors.packed_shard import PackedLayout, PackedShard

STORED = "stored"
KINDS = (STORED, *RECIPES)
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
    with published(model) as base:
        named = dict(base.named_parameters(remove_duplicate=False))
    if frozen_dtype == STORED and kept_of(base, Settings) is None:
        raise ValueError(
            "frozen_dtype='stored' keeps weights as a quantised checkpoint has them, and this model was not "
            f"built from one by build_meta_model: take a dtype, or {' or '.join(map(repr, RECIPES))}"
        )
    spared = {id(p) for module in copied_modules(model) for p in module.parameters()} | set(kept)
    chosen = to_prepare(base, matrices_to_pack(named, blocks.values(), spared))
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
    with published(model) as base:
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

"""Frozen weights that are kept packed: which they are by a config alone, and what their values take.

What is packed, how rows lie and how values are computed is the library's own code (``shard/packing.py``,
``_tensors/packed_shard.py``), here on the meta device.
"""

import functools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_sft._quantised.find import is_left_out, row_by_config
from fsdp_sft._quantised.recipes import RECIPES
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._tensors.packed_shard import VALUES_AT_ONCE, PackedLayout, RowFormat
from fsdp_sft.planner.ledger import Ledger
from fsdp_sft.planner.workload import Workload, work_of
from fsdp_sft.shard.float32_modules import kept_parameters
from fsdp_sft.shard.packing import STORED, matrices_to_pack

_RUNS = 3  # of values that are computed at once, after which runs are alike


def layouts_of(
    model: Any, blocks: Collection[nn.Module], kind: str, settings: Settings | None
) -> dict[int, PackedLayout]:
    """How each weight that is kept packed lies in rows, by the id of the parameter.

    Args:
        model: The model on the meta device, in the compute dtype, with what is trained.
        blocks: Its blocks.
        kind: ``"stored"``, or the name of a recipe.
        settings: How the checkpoint is quantised by its config; None if it is not.

    Raises:
        ValueError: If nothing is frozen, or the config does not say how rows are stored.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    spared = set[int]()
    if model.dtype in (torch.float16, torch.bfloat16):
        names = kept_parameters(model, model.dtype, {name: p.dtype for name, p in named.items()})
        spared = {id(named[name]) for name in names}
    matrices = matrices_to_pack(named, blocks, spared)
    if not matrices:
        raise ValueError(
            f"frozen_dtype={kind!r} is for frozen weights, and no matrix in a block is frozen: give "
            "lora_rank, or trainable"
        )
    rows = _RowForms(kind, settings)
    found = {id(p): layout for name, p in matrices.items() if (layout := rows.layout(name, tuple(p.shape)))}
    if not found:
        assert settings is not None
        raise ValueError(
            f"frozen_dtype='stored': the config ({settings.method}) does not say of any weight that its rows "
            f"have bytes of their own; {' or '.join(map(repr, RECIPES))} packs them anew"
        )
    return found


class _RowForms:
    """The formats of rows, each made once, so that blocks that are alike compare equal."""

    def __init__(self, kind: str, settings: Settings | None) -> None:
        self.settings = settings if kind == STORED else None
        if kind == STORED and settings is None:
            raise ValueError(
                "frozen_dtype='stored' keeps weights as a quantised checkpoint has them, and the config has "
                f"no quantization_config: take a dtype, or {' or '.join(map(repr, RECIPES))}"
            )
        self.of = functools.cache(self._stored if kind == STORED else functools.partial(self._made, kind))

    def layout(self, name: str, shape: tuple[int, ...]) -> PackedLayout | None:
        """How a weight lies in rows; None if it stays in 16 bits."""
        module = name.removesuffix(".weight").removesuffix(".base")
        if self.settings is not None and is_left_out(self.settings, module):
            return None
        found = self.of((1, *shape[1:]) if len(shape) == 3 else shape[1:])
        return None if found is None else PackedLayout(found[0], shape, found[1])

    def _stored(self, shape: tuple[int, ...]) -> tuple[RowFormat, bool] | None:
        assert self.settings is not None
        return row_by_config(self.settings, shape)

    def _made(self, kind: str, shape: tuple[int, ...]) -> tuple[RowFormat, bool] | None:
        return RECIPES[kind].form(shape[-1]), False


@dataclass(frozen=True)
class Decoding:
    """What computing the values of a gathered weight takes, besides the values.

    Attributes:
        peak: Most bytes alive at once.
        work: Operations of a part of the weight.
        times: The weight in such parts.
    """

    peak: int
    work: Workload
    times: float


@functools.lru_cache(maxsize=1024)
def decoding(layout: PackedLayout, dtype: torch.dtype) -> Decoding:
    """Compute a part of a weight on the meta device, by the function that the gather calls."""
    each = math.prod(layout.shape[1:])
    number = min(layout.shape[0], max(2, -(-_RUNS * VALUES_AT_ONCE // each)))
    rows = torch.empty((number * layout.rows_each, layout.form.row_bytes), dtype=torch.uint8, device="meta")
    place = torch.empty((number, *layout.shape[1:]), dtype=dtype, device="meta")
    ledger = Ledger()
    ledger.ignore((rows, place))
    with ledger:
        layout.fill(rows, place)
    return Decoding(ledger.peak, work_of(ledger.events), layout.shape[0] / number)


def decoding_peak(layouts: Iterable[PackedLayout], dtype: torch.dtype) -> int:
    """Most bytes that a gather of several weights takes beyond those that it ends with.

    They are computed one after the other, each into memory that is allocated just before.
    """
    most = behind = 0
    for layout in reversed(list(layouts)):
        most = max(most, decoding(layout, dtype).peak - behind)
        behind += math.prod(layout.shape) * dtype.itemsize
    return most

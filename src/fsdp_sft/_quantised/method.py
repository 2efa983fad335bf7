"""What a way to quantise is made of; each is a file, which ``find.METHODS`` lists by the name in configs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fsdp_sft._quantised.settings import Settings
from fsdp_sft._quantised.tensors import Tensors
from fsdp_sft._tensors.pieces import Ints

Entries: TypeAlias = Mapping[str, tuple[torch.dtype, Ints]]  # dtype and shape of tensors, by name


@dataclass(frozen=True)
class Method:
    """A way to quantise.

    Attributes:
        check: Refuses what is not read, by the config alone.
        find: Adds the weights among some stored tensors.
        parts: Pattern of the names that tensors of packed weights have, and no others.
        bits: Bits that a packed value takes with its share of the scales, by the config.
        only_experts: Whether none but the weights of experts are packed.
        skips: Fields of the config that list modules in 16 bits. It serves the planner.
        stored_as: Function from the config and a weight's shape in the model to the tensors of one of its
            rows, as a weight ``w``; it returns None if such a weight is not packed. It serves the planner,
            which sees no files. None if rows have no bytes of their own.
    """

    check: Callable[[Settings], None]
    find: Callable[[Tensors, Iterable[str]], None]
    parts: str
    bits: Callable[[Settings], float]
    only_experts: bool = False
    skips: tuple[str, ...] = ()
    stored_as: Callable[[Settings, Ints], Entries | None] | None = None

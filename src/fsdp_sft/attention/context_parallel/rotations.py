"""Rotary embeddings that depend on a row's length get whole rows where a forward has parts of them."""

from typing import Any

import torch
from torch import nn

from fsdp_sft._model.blocks import find_blocks
from fsdp_sft._model.twin import rotations_by_length
from fsdp_sft.attention.context_parallel.group import rows_in_forward
from fsdp_sft.errors import UnsupportedModelError

_HOOKED = "_fsdp_sft_whole_positions"


def show_whole_positions(model: nn.Module) -> None:
    """Let such embeddings (dynamic NTK, LongRoPE) compute all positions of a row, and keep this rank's part.

    They take the length of the row from the positions, and from its own alone each rank would take another
    length. Forwards of whole rows do not change. A second call adds nothing.

    Raises:
        UnsupportedModelError: If such an embedding lies in a block, which a recomputation may run where the
            whole rows are not known.
    """
    blocks = tuple(f"{name}." for name in find_blocks(model))
    for name, module in rotations_by_length(model).items():
        if name.startswith(blocks):
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) computes rotary embeddings by the longest row, within a "
                "block: a rank that has a part of the row cannot"
            )
        if _HOOKED not in module.__dict__:
            module.__dict__[_HOOKED] = True
            module.register_forward_pre_hook(_with_whole_positions, with_kwargs=True)
            module.register_forward_hook(_own_part)


def _with_whole_positions(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Hook before the forward: replaces the positions by those of the whole rows."""
    rows = rows_in_forward()
    if rows is None:
        return None
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": rows.position_ids}
    return (args[0], rows.position_ids, *args[2:]), kwargs


def _own_part(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Hook after the forward: narrows the embeddings to this rank's positions."""
    rows = rows_in_forward()
    if rows is None:
        return None
    each = rows.length // rows.group.size

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(1, rows.group.rank * each, each)

    return own(output) if isinstance(output, torch.Tensor) else tuple(own(part) for part in output)

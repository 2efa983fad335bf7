"""Compile a model block by block."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp_sft._model.blocks import find_blocks
from fsdp_sft.sac import named_blocks
from fsdp_sft.sac.attach import checkpointed
from fsdp_sft.sac.offload import COMPILED

# torch compiles a function once per variant: checkpointed or not, training or not, with and without
# gradients, fixed or dynamic lengths, each kind of layer in a model. The first three alone use up torch's
# default limit of 8.
_VARIANTS = 64


def compile_blocks(
    model: nn.Module,
    *,
    blocks: Iterable[int | str] | None = None,
    **compile_kwargs: Any,
) -> list[str]:
    """Compile each block in place with ``torch.compile``; parameter names do not change.

    Blocks of one class share their compiled code, so the model compiles in the time of one block. Call it
    after ``apply_sac`` and before ``shard_model``. The code may have up to 64 variants (torch's default is
    8), for checkpointing, mode, gradients and lengths. A block that needs more runs in eager mode, and torch
    warns of it.

    Args:
        model: Any model that ``find_blocks`` reads.
        blocks: FQNs or positions of blocks (see ``apply_sac``); None takes all blocks.
        **compile_kwargs: Options of ``torch.compile``, such as ``backend=`` or ``dynamic=``.

    Returns:
        FQNs of the compiled blocks, in forward order.

    Raises:
        UnsupportedModelError: If the model has no blocks.
        ValueError: If a block is unknown, or was chosen by ``apply_sac(offload=True)``.

    Example:
        >>> fs.compile_blocks(model)
        ['model.layers.0', 'model.layers.1', 'model.layers.2', 'model.layers.3']
    """
    chosen = find_blocks(model) if blocks is None else named_blocks(model, blocks)
    for fqn, block in chosen.items():
        if checkpointed(block).is_offloaded:
            raise ValueError(COMPILED.format(fqn))
    for block in chosen.values():
        block.compile(**{"recompile_limit": _VARIANTS, **compile_kwargs})
    return list(chosen)

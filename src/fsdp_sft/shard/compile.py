"""Compile a model block by block."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp_sft._model.blocks import find_blocks
from fsdp_sft._model.recompiles import compile_block
from fsdp_sft._process.words import answered
from fsdp_sft.sac import Ratio, compile_under_budget, named_blocks


@answered
def compile_blocks(
    model: nn.Module,
    *,
    memory_budget: Ratio | None = None,
    blocks: Iterable[int | str] | None = None,
    **compile_kwargs: Any,
) -> list[str]:
    """Compile each block in place with ``torch.compile``; parameter names do not change.

    Blocks of one class share their compiled code, so the model compiles in the time of one block. Call it
    after ``apply_sac`` and before ``shard_model``. The code may have up to 64 variants (torch's default is
    8), for checkpointing, mode, gradients and lengths. A block that needs more runs in eager mode, and a
    warning names it.

    With ``memory_budget`` the compiler chooses what to recompute in the backward, so that blocks keep at most
    that share of their activations. This is an alternative to ``apply_sac`` and cannot be combined with it:
    torch would ignore the budget, or what ``apply_sac`` has marked. ``remove_sac`` removes the compiled code.

    Args:
        model: Any model that ``find_blocks`` reads.
        memory_budget: Share of the activations that compiled code keeps by default, in [0, 1]: a number or a
            text such as ``"1/2"``. 1 keeps what the compiler would keep anyway, 0 only the blocks' inputs.
            None leaves torch's own setting.
        blocks: FQNs or positions of blocks (see ``apply_sac``); None takes all blocks.
        **compile_kwargs: Options of ``torch.compile``, such as ``backend=`` or ``dynamic=``. With
            ``memory_budget`` only ``backend`` (``"inductor"``, ``"aot_eager"`` or a function that partitions
            by AOTAutograd), ``dynamic`` and ``fullgraph`` are allowed.

    Returns:
        FQNs of the compiled blocks, in forward order.

    Raises:
        UnsupportedModelError: If the model has no blocks.
        TypeError: If ``memory_budget`` is neither a number nor a text, or a keyword is not allowed with it.
        ValueError: If an argument is out of range, or a block is unknown. With ``memory_budget``, also if the
            backend would ignore it, if a block is compiled already, or if ``apply_sac`` is on.

    Memory: With ``memory_budget``, torch decides by its own estimates while the first batch is compiled.

    Example:
        >>> fs.compile_blocks(model)
        ['model.layers.0', 'model.layers.1', 'model.layers.2', 'model.layers.3']
        >>> fs.compile_blocks(fs.build_meta_model(path), memory_budget="1/2")
        ['model.layers.0', ...]
    """
    if memory_budget is not None:
        return compile_under_budget(model, memory_budget, blocks, **compile_kwargs)
    chosen = find_blocks(model) if blocks is None else named_blocks(model, blocks)
    for fqn, block in chosen.items():
        compile_block(block, fqn, **compile_kwargs)
    return list(chosen)

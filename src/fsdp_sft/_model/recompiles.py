"""Blocks compiled with a higher limit of recompilations."""

from torch import nn

# torch compiles a function once per variant: checkpointed or not, training or not, with and without
# gradients, fixed or dynamic lengths, each kind of layer in a model. The first three alone use up torch's
# default limit of 8.
_VARIANTS = 64

AROUND_COMPILED = "_fsdp_sft_around_compiled"  # attribute of a block: function that wraps the compiled call


def compile_block(block: nn.Module, **kwargs: object) -> None:
    """``block.compile(**kwargs)`` with a higher limit of compiled variants than torch's default.

    A block that needs even more then runs in eager mode, and torch warns of it.
    """
    block.compile(**{"recompile_limit": _VARIANTS, **kwargs})
    if AROUND_COMPILED in block.__dict__:
        block.__dict__[AROUND_COMPILED]()

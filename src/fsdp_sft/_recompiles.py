"""Blocks compiled with room for their variants, and a word when one runs out of it."""

import logging
import sys
import warnings

from torch import nn

from fsdp_sft._compat import LIMIT_LOGGER, limit_that_was_hit, recompile_options

# Variants of one block's code: checkpointed or not, training or not, with and without gradients, lengths
# fixed or dynamic, several kinds of layer in a model. torch's own 8 are used up by the first three.
_VARIANTS = 64

_NAME = "_fsdp_sft_compiled_as"  # on a block
AROUND_COMPILED = "_fsdp_sft_around_compiled"  # on a block: a function that puts something around the call


def compile_block(block: nn.Module, fqn: str, **kwargs: object) -> None:
    """``block.compile(**kwargs)`` with room for more variants than torch gives.

    A block that needs more still goes on in eager mode, as torch has it, and a warning then names it.
    """
    block.compile(**{**recompile_options(_VARIANTS), **kwargs})
    block.__dict__[_NAME] = fqn
    if AROUND_COMPILED in block.__dict__:
        block.__dict__[AROUND_COMPILED]()
    logger = logging.getLogger(LIMIT_LOGGER)
    if not any(isinstance(handler, _LimitHandler) for handler in logger.handlers):
        logger.addHandler(_LimitHandler(logging.WARNING))


class _LimitHandler(logging.Handler):
    """Hears of it when torch stops compiling some code, and names the block that is being called."""

    def emit(self, record: logging.LogRecord) -> None:
        limit = limit_that_was_hit(record)
        fqn = _block_being_called() if limit is not None else None
        if fqn is not None:
            warnings.warn(
                f"block {fqn} has as many compiled variants as torch's {limit} allows, and goes on in "
                "eager mode for others; the cause is in torch's own warning. Rows of fewer lengths, or "
                "compile_blocks(model, dynamic=True), need fewer variants",
                stacklevel=2,
            )


def _block_being_called() -> str | None:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        module = frame.f_locals.get("self") if frame.f_code.co_name == "_wrapped_call_impl" else None
        if isinstance(module, nn.Module) and _NAME in module.__dict__:
            return str(module.__dict__[_NAME])
    return None

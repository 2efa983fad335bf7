"""Blocks compiled with a higher limit of recompilations, and a warning when a block reaches it."""

import logging
import sys

from torch import nn

from fsdp_sft._compat.compile import LIMIT_LOGGER, limit_that_was_hit
from fsdp_sft._process.callers import warn_caller

# torch compiles a function once per variant: checkpointed or not, training or not, with and without
# gradients, fixed or dynamic lengths, each kind of layer in a model. The first three alone use up torch's
# default limit of 8.
_VARIANTS = 64

_NAME = "_fsdp_sft_compiled_as"  # attribute of a block: its FQN
AROUND_COMPILED = "_fsdp_sft_around_compiled"  # attribute of a block: function that wraps the compiled call


def compile_block(block: nn.Module, fqn: str, **kwargs: object) -> None:
    """``block.compile(**kwargs)`` with a higher limit of compiled variants than torch's default.

    A block that needs even more then runs in eager mode, as torch defines it, and a warning names it.
    """
    block.compile(**{"recompile_limit": _VARIANTS, **kwargs})
    block.__dict__[_NAME] = fqn
    if AROUND_COMPILED in block.__dict__:
        block.__dict__[AROUND_COMPILED]()
    logger = logging.getLogger(LIMIT_LOGGER)
    if not any(isinstance(handler, _LimitHandler) for handler in logger.handlers):
        logger.addHandler(_LimitHandler(logging.WARNING))


class _LimitHandler(logging.Handler):
    """Log handler that warns with the name of the block when torch reaches its limit."""

    def emit(self, record: logging.LogRecord) -> None:
        """Warn if the record says that the limit was reached inside a block."""
        limit = limit_that_was_hit(record)
        fqn = _block_being_called() if limit is not None else None
        if fqn is not None:
            warn_caller(
                f"block {fqn} has as many compiled variants as torch's {limit} allows, and goes on in "
                "eager mode for others; the cause is in torch's own warning. Rows of fewer lengths, or "
                "compile_blocks(model, dynamic=True), need fewer variants"
            )


def _block_being_called() -> str | None:
    """FQN of the innermost compiled block on this thread's stack; None outside any."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        module = frame.f_locals.get("self") if frame.f_code.co_name == "_wrapped_call_impl" else None
        if isinstance(module, nn.Module) and _NAME in module.__dict__:
            return str(module.__dict__[_NAME])
    return None

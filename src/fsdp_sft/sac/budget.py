"""Let the compiler choose what to recompute, under a memory budget."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fsdp_sft._compat.compile import backend_with_memory_budget, is_compiled
from fsdp_sft._model.blocks import find_blocks
from fsdp_sft._model.recompiles import compile_block
from fsdp_sft.sac.apply import named_blocks
from fsdp_sft.sac.attach import enter_mode, override, restore
from fsdp_sft.sac.ratio import Ratio, parse_ratio

# Backends that divide the graph into forward and backward under the budget; others would ignore it.
_PARTITIONING = ("inductor", "aot_eager", "aot_eager_decomp_partition")
_MODE = "compile_blocks(memory_budget=...)"


def compile_under_budget(
    model: nn.Module,
    memory_budget: Ratio,
    blocks: Iterable[int | str] | None = None,
    *,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **others: Any,
) -> list[str]:
    """Compile blocks under a memory budget: ``compile_blocks(memory_budget=...)``.

    It cannot be combined with checkpointing, because torch would ignore the budget or the operations that
    checkpointing has marked.

    Raises:
        TypeError: If the budget is neither a number nor a text, or if there are other options: torch would
            pass ``mode`` and ``options`` to the backend that sets the budget.
        ValueError: If ``compile_blocks`` refuses the arguments or the model.
    """
    if others:
        raise TypeError(
            f"with memory_budget= compile_blocks takes backend, dynamic and fullgraph, not {sorted(others)}"
        )
    try:
        share = float(parse_ratio(memory_budget))
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("ratio", "memory_budget")) from None
    if isinstance(backend, str) and backend not in _PARTITIONING:
        raise ValueError(
            f"backend {backend!r} does not look at the memory budget; take one of {_PARTITIONING}"
        )
    chosen = find_blocks(model) if blocks is None else named_blocks(model, blocks)
    enter_mode(model, _MODE)
    compiled = [fqn for fqn, block in chosen.items() if is_compiled(block)]
    if compiled:
        restore(model)
        raise ValueError(
            f"{compiled[0]} is compiled already, without the budget; leave that compile_blocks out"
        )
    limited = backend_with_memory_budget(backend, share)
    for fqn, block in chosen.items():
        override(block, _compiled_call_impl=None)
        compile_block(block, fqn, backend=limited, dynamic=dynamic, fullgraph=fullgraph)
    return list(chosen)

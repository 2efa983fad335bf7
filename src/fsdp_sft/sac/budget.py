"""Let the compiler choose what to recompute, under a memory budget."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fsdp_sft._compat import backend_with_memory_budget, is_compiled
from fsdp_sft._recompiles import compile_block
from fsdp_sft.blocks import find_blocks
from fsdp_sft.sac.apply import named_blocks
from fsdp_sft.sac.attach import enter_mode, override, restore
from fsdp_sft.sac.ratio import Ratio, parse_ratio

# Backends that partition forward and backward under the budget; the others would not look at it.
_PARTITIONING = ("inductor", "aot_eager", "aot_eager_decomp_partition")


def compile_with_memory_budget(
    model: nn.Module,
    *,
    budget: Ratio,
    blocks: Iterable[int | str] | None = None,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> list[str]:
    """Compile blocks so that they keep at most a share of their activations; the compiler chooses which.

    The third way to recompute, beside ``apply_sac`` and ``apply_op_sac``, which it excludes: torch would
    ignore the budget, or else what they have marked. Takes the place of ``compile_blocks``; ``remove_sac``
    takes the compiled code off again.

    Args:
        model: Any model that ``find_blocks`` reads.
        budget: Share of the activations that compiled code keeps by default, in [0, 1]. 1 keeps what the
            compiler would keep anyway, 0 only the blocks' inputs.
        blocks: FQNs or positions, as in ``apply_sac``; None takes all blocks.
        backend: ``"inductor"``, ``"aot_eager"`` or a function that partitions by AOTAutograd.
        dynamic: As in ``torch.compile``.
        fullgraph: As in ``torch.compile``.

    Returns:
        FQNs of the compiled blocks, in forward order.

    Raises:
        NoBlocksError: If the model has no blocks.
        TypeError: If ``budget`` is no number or text.
        ValueError: If an argument is out of range, the backend does not look at the budget, a block is
            compiled already, or ``apply_sac`` or ``apply_op_sac`` is on.

    Memory: Decided while the first batch is compiled, by torch's own estimates.
    """
    try:
        share = float(parse_ratio(budget))
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("ratio", "budget")) from None
    if isinstance(backend, str) and backend not in _PARTITIONING:
        raise ValueError(
            f"backend {backend!r} does not look at the memory budget; take one of {_PARTITIONING}"
        )
    chosen = find_blocks(model) if blocks is None else named_blocks(model, blocks)
    enter_mode(model, "compile_with_memory_budget", replaces={"compile_with_memory_budget"})
    compiled = [fqn for fqn, block in chosen.items() if is_compiled(block)]
    if compiled:
        restore(model)
        raise ValueError(f"{compiled[0]} is compiled already, without the budget; leave compile_blocks out")
    limited = backend_with_memory_budget(backend, share)
    for fqn, block in chosen.items():
        override(block, _compiled_call_impl=None)
        compile_block(block, fqn, backend=limited, dynamic=dynamic, fullgraph=fullgraph)
    return list(chosen)

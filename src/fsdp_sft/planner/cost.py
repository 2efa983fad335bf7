"""What one operation costs: FLOPs, and bytes read from and written to the device's memory."""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fsdp_sft._model.named import tensors_in

_MOVE_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
_ONLY_WRITE = ("copy_", "zero_", "fill_", "new_zeros", "zeros_like", "ones_like", "full_like")


def flops_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """FLOPs of one operation; a multiplication and its addition are two. 0 for whatever is no product."""
    packet = op.overloadpacket
    # torch's registry does not know grouped products: (rows, inner) by (experts, inner, columns), each row
    # with the matrix of its expert.
    if packet.__name__ == "_grouped_mm":
        rows, columns = args[0], args[1]
        return float(2 * rows.shape[0] * rows.shape[-1] * columns.shape[-1])
    count: Any = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def moved_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Bytes that one operation reads and writes; 0 for a view, or where memory is only allocated."""
    name = op.overloadpacket.__name__
    if name in _MOVE_NOTHING or op.is_view:
        return 0.0
    read = args[1:] if name in _ONLY_WRITE else (args, kwargs)
    return float(sum(map(_nbytes, tensors_in(read))) + sum(map(_nbytes, tensors_in(result))))


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's distinct elements: what ``expand`` repeats lies in memory once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()

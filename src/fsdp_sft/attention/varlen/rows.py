"""The rows of a pack, read off the mask that transformers would make for it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_sft._process.streams import host_copies, travelling

_SLAB = 512  # number of queries whose mask exists at the same time while rows are found


@dataclass(eq=False)  # not frozen: Dynamo of torch 2.11 recompiles for other bounds of a frozen one
class RowMask:
    """The rows of a batch, which layers get instead of a mask: causal within rows, nothing between them.

    A model that uses it like a tensor (an index, ``dtype``, ``torch.where``) gets the dense mask instead.

    Attributes:
        bounds: Token at which each of the N rows begins, and the end of the last row: N + 1 numbers, counted
            over all sequences of a batch.
        offsets: ``bounds`` on the device, int32 ``(N + 1,)``.
        longest: Tokens of the longest row.
        sliding_window: Most keys that a query sees, itself included; no more than ``longest``.
        width: Tokens of a sequence.
        has_flash: Whether the device has torch's varlen flash attention.
    """

    bounds: tuple[int, ...]
    offsets: torch.Tensor
    longest: int
    sliding_window: int
    width: int
    has_flash: bool

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._mask()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python and torch look for such names in any object
            raise AttributeError(name)
        return getattr(self._mask(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [x._mask() if isinstance(x, RowMask) else x for x in args]
        return function(*args, **(kwargs or {}))

    def _mask(self) -> torch.Tensor:
        """The dense mask of the whole batch."""
        return self.dense(self.bounds[-1] // self.width, self.width)

    def dense(self, batch_size: int, width: int) -> torch.Tensor:
        """The dense mask as transformers makes it: bool ``(B, 1, S, S)``."""
        tokens = torch.arange(batch_size * width, dtype=torch.int32, device=self.offsets.device)
        rows = torch.bucketize(tokens, self.offsets, right=True).view(batch_size, 1, 1, width)
        return (rows.transpose(2, 3) == rows) & self.within(tokens[:width])

    def within(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mask of a single row: bool ``(S, S)`` for its S positions ``tokens``."""
        before = tokens[:, None] - tokens
        return (before >= 0) & (before < self.sliding_window)


def find_rows(slab: Callable[..., torch.Tensor], width: int, offset: int) -> RowMask | None:
    """The rows of a mask; None if it is not causal attention within rows, possibly with a sliding window.

    Args:
        slab: Function that makes the mask of ``q_length`` queries from ``q_offset`` on.
        width: Tokens of a sequence.
        offset: Position of the first query.
    """
    # For each query: the first key that it sees (`first`), and whether it sees all keys from there to itself
    # and no others (`exact`). A query that sees itself first begins a row.
    first, exact = [], []
    for start in range(0, width, _SLAB):
        allowed = slab(q_length=min(_SLAB, width - start), q_offset=offset + start)[:, 0]
        keys = torch.arange(width, device=allowed.device)
        queries = keys[start : start + _SLAB, None]
        seen = allowed.to(torch.uint8).argmax(-1, keepdim=True)
        exact.append((allowed == ((keys >= seen) & (keys <= queries))).all())
        first.append(seen.squeeze(-1))
    index, starts = torch.arange(width, device=first[0].device), torch.cat(first, -1)
    begins = starts == index
    row_start = torch.where(begins, index, 0).cummax(-1).values
    # The window is as wide as the query that sees farthest back. Then every query must see either back to the
    # start of its row or that far.
    reach = (index - starts).amax()
    exact.append((starts == torch.maximum(row_start, index - reach)).all())
    # The only place at which the host waits for the device.
    told, longest_reach, edges = host_copies([torch.stack(exact).all(), reach, begins.flatten()])
    if not bool(told):
        return None
    bounds = [*edges.nonzero().squeeze(1).tolist(), begins.numel()]
    longest = max(after - before for before, after in itertools.pairwise(bounds))
    offsets = travelling(torch.tensor(bounds, dtype=torch.int32), starts.device)
    return RowMask(tuple(bounds), offsets, longest, int(longest_reach) + 1, width, _has_flash(starts.device))


def _has_flash(device: torch.device) -> bool:
    """Whether torch has varlen flash attention for the device."""
    # torch.nn.attention.varlen has kernels only for CUDA with compute capability 8.0 or later.
    return (
        device.type == "cuda"
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )

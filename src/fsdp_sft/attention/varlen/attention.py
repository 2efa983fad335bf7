"""Attention row by row, in the form that transformers' attention and mask interfaces require."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

from fsdp_sft._process.streams import host_copies, travelling
from fsdp_sft.errors import PackingError

# The rows of a pack, read off the mask that transformers would make for it.

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


IMPLEMENTATION = "sdpa_varlen"  # its name in ``model.config``
# Rows that run one by one are padded to a multiple of this: a CPU keeps code and memory for each new length.
_MULTIPLE = 64
_BEYOND = ("position_bias", "s_aux", "cache")  # arguments with which attention is left to "sdpa"
_LARGEST_HEAD = 256  # largest head size of torch's flash attention


def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> torch.Tensor | RowMask | None:
    """A ``RowMask`` if it equals the ``"sdpa"`` mask, or that; a function of transformers' mask interface."""
    plain = functools.partial(
        AttentionMaskInterface()["sdpa"], batch_size=batch_size, kv_length=kv_length, **others
    )
    # transformers forbids skipping the mask if it has found several rows. If it allows that, there is one.
    one_row = allow_is_causal_skip or allow_is_bidirectional_skip
    unknown = torch.compiler.is_compiling() or torch.device(others.get("device", "cpu")).type == "meta"
    if not (one_row or unknown or attention_mask is not None or q_length != kv_length):
        slab = functools.partial(plain, allow_is_causal_skip=False)
        rows = find_rows(slab, q_length, others.get("q_offset", 0))
        if rows is not None:
            return rows
    mask: torch.Tensor | None = plain(
        q_length=q_length,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
    )
    return mask


def attend_by_row(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | RowMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within rows, as a function of transformers' attention interface.

    Args:
        module: The attention layer.
        query: Queries, ``(B, heads, S, D)``.
        key: Keys, ``(B, key heads, S, D)``.
        value: Values, ``(B, key heads, S, value size)``.
        attention_mask: A ``RowMask``, or a mask for ``"sdpa"``, which then computes everything.
        dropout: Probability of dropout.
        scaling: Factor of the attention scores.
        **others: Further arguments of transformers' attention interface.

    Returns:
        (output ``(B, S, heads, value size)``, None for the attention weights).

    Raises:
        PackingError: If the model caps its attention scores.
    """
    if others.get("softcap") is not None:
        # In transformers 5.17 "sdpa" ignores it silently, and torch's kernel has no such argument.
        raise PackingError(
            "attention row by row does not support `softcap`, by which this model caps its attention scores; "
            "set model.set_attn_implementation('eager'), which does"
        )
    sdpa = functools.partial(AttentionInterface()["sdpa"], module, dropout=dropout, scaling=scaling, **others)
    if not isinstance(attention_mask, RowMask):
        return sdpa(query, key, value, attention_mask)  # type: ignore[no-any-return]
    rows, (batch_size, _, width, _) = attention_mask, query.shape
    by_itself = width == key.shape[2] and all(others.get(name) is None for name in _BEYOND)
    if by_itself and not dropout and rows.has_flash and _fits_flash(query, value):
        out = _varlen(_joined(query), _joined(key), _joined(value), rows, scaling)
        return out.unflatten(0, (batch_size, width)), None
    if not by_itself or torch.compiler.is_compiling():
        return sdpa(query, key, value, rows.dense(batch_size, width))  # type: ignore[no-any-return]
    lengths = [after - before for before, after in itertools.pairwise(rows.bounds)]
    parts = zip(*(_joined(x).split(lengths, dim=2) for x in (query, key, value)), strict=True)
    others["is_causal"] = True
    sdpa = functools.partial(sdpa, **others)
    outs = [_row(sdpa, rows, length, part) for length, part in zip(lengths, parts, strict=True)]
    return torch.cat(outs, 1)[0].unflatten(0, (batch_size, width)), None


def _row(sdpa: Callable[..., Any], rows: RowMask, length: int, row: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Attention of one row, padded at its end, to which no token of the row attends."""
    filler = -length % _MULTIPLE
    padded = [F.pad(x, (0, 0, 0, filler)) for x in row]
    mask = None
    if length > rows.sliding_window:
        mask = rows.within(torch.arange(length + filler, device=row[0].device))[None, None]
    out: torch.Tensor = sdpa(*padded, mask)[0]
    return out[:, :length]


def _joined(x: torch.Tensor) -> torch.Tensor:
    """From ``(B, heads, S, D)`` to ``(1, heads, B * S, D)``."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _fits_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether dtypes and head sizes are among those of torch's flash attention."""
    head = query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    return half and value.shape[-1] <= head <= _LARGEST_HEAD and head % 8 == 0


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: RowMask, scale: float | None
) -> torch.Tensor:
    """Run torch's varlen flash attention on tensors of ``_joined``: ``(B * S, heads, value size)``."""
    size = value.shape[-1]
    # In latent attention values may be shorter than queries.
    value = F.pad(value, (0, query.shape[-1] - size))
    tokens = [x[0].transpose(0, 1) for x in (query, key, value)]
    options: dict[str, Any] = {"enable_gqa": True} if query.shape[1] > key.shape[1] else {}
    options["window_size"] = (-1 if rows.sliding_window == rows.longest else rows.sliding_window - 1, 0)
    rows_of_both: Any = (rows.offsets, rows.offsets, rows.longest, rows.longest)
    out: Any = varlen_attn(*tokens, *rows_of_both, scale=scale, **options)  # type: ignore[arg-type]
    return out[..., :size]  # type: ignore[no-any-return]

"""Stand-ins that keep and allocate what kernels and exchanges between ranks do.

The meta device would run other kernels, no router can choose there, and there are no other ranks: each expert
gets an equal share of the tokens, and an exchange brings as many as it sends.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fsdp_sft._compat.attention import attention_of
from fsdp_sft._compat.experts import experts_forward, experts_to_place, switchable_experts
from fsdp_sft._process.gpus import Gpu
from fsdp_sft.attention.context_parallel import (
    SequenceGroup,
    WholeRows,
    check_shareable,
    part_of_rows,
    share_attention,
)
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.loss.blocks import CACHED_BYTES
from fsdp_sft.loss.linear import default_chunk_size
from fsdp_sft.planner.ledger import ATTENTION, EXCHANGE, LOSS, Ledger
from fsdp_sft.planner.run import Run


class Kernels(TorchFunctionMode):
    """A mode under which attention takes as much memory as a device's fused kernel does.

    It also answers the one question about values that transformers asks: whether a padding mask is all ones.
    A meta tensor cannot say so; the run does.
    """

    def __init__(self, run: Run, ledger: Ledger) -> None:
        super().__init__()
        self.run, self.gpu, self.ledger = run, run.device, ledger

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return not self.run.attention_mask
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        """Fused attention instead of ``scaled_dot_product_attention``."""
        if dropout_p > 0 and self.gpu.name == "cpu":
            # torch's CPU kernel has no dropout; what it falls back to keeps the attention matrix.
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, **options
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # torch turns a boolean mask into a bias of the query's dtype before it calls a kernel.
            bias = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = bias.masked_fill_(attn_mask.logical_not(), float("-inf"))
        return _FusedAttention.apply(query, key, value, attn_mask, is_causal, self.gpu, self.ledger)


class _FusedAttention(torch.autograd.Function):
    """Attention that keeps query, key, value, bias, output and one float32 per query and head.

    The attention matrix never exists.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        causal: bool,
        gpu: Gpu,
        ledger: Ledger,
    ) -> torch.Tensor:
        out = _attention_output(query, value.shape[-1], gpu, masked=bias is not None)
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, bias, out, rows)
        ctx.ledger = ledger
        # Two products. A causal kernel skips what is above the diagonal; a kernel with a mask does not.
        scores = query.shape[:-1].numel() * key.shape[-2] / (2 if causal else 1)
        ctx.flops = 2.0 * scores * (query.shape[-1] + value.shape[-1])
        moved = sum(float(t.nbytes) for t in (query, key, value, out))
        ledger.note(ATTENTION, (query, key, value, bias), (out, rows), flops=ctx.flops, moved=moved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, _, _ = ctx.saved_tensors
        result = [torch.empty_like(t) for t in (query, key, value)]
        moved = 2.0 * sum(t.nbytes for t in (grads[0], query, key, value))
        # Five products instead of the forward's two: the scores were not kept and are recomputed.
        ctx.ledger.note(ATTENTION, (grads[0], query, key, value), result, flops=2.5 * ctx.flops, moved=moved)
        return (*result, None, None, None, None)


def _attention_output(query: torch.Tensor, width: int, gpu: Gpu, *, masked: bool) -> torch.Tensor:
    """An empty output with the strides that the device's kernel gives it; see ``Gpu.attention_output``."""
    batch, heads, length, _ = query.shape
    if gpu.attention_output == "heads":
        return query.new_empty(batch, heads, length, width)
    if gpu.attention_output == "tokens" and masked:
        return query.new_empty(batch, length, heads, width).transpose(1, 2)
    return torch.empty_like(
        query[..., :width] if width <= query.shape[-1] else query.expand(-1, -1, -1, width)
    )


class _ChunkedLoss(torch.autograd.Function):
    """Stand-in for ``fsdp_sft.linear_cross_entropy_sum``: its buffers, with the lifetimes they have there.

    Gradients are computed in the forward, in a wide dtype, and cast in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gpu: Gpu,
        ledger: Ledger,
    ) -> torch.Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        kept = [
            torch.empty_like(t, dtype=wide, memory_format=torch.contiguous_format)
            if t is not None and needed
            else None
            for t, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        ctx.kept, ctx.dtype = kept, hidden.dtype
        rows = min(default_chunk_size(hidden.shape[1], hidden.dtype), hidden.shape[0])
        _chunk_buffers(hidden, weight, rows, wide, gpu)
        # All three products run in the forward, that of the weight's gradient only if it is trained.
        products = 2 + int(ctx.needs_input_grad[1])
        logits = float(hidden.shape[0] * weight.shape[0])
        for _ in range(products):
            moved = float(hidden.nbytes + weight.nbytes) + 4 * logits
            ledger.note(LOSS, (hidden, weight), (), flops=2 * logits * hidden.shape[1], moved=moved)
        # The logits pass through memory five times: maximum, sum of exponentials, gradient and its cast.
        ledger.note(LOSS, (hidden,), (), moved=5 * 4 * logits)
        return hidden.new_zeros((), dtype=wide)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        results: list[torch.Tensor | None] = []
        for index in range(3):
            # Each wide gradient is freed once its cast exists, before the next one is cast.
            kept, ctx.kept[index] = ctx.kept[index], None
            results.append(None if kept is None else torch.empty_like(kept, dtype=ctx.dtype))
            del kept
        return (*results, None, None)


chunked_loss: Any = _ChunkedLoss.apply


def _chunk_buffers(
    hidden: torch.Tensor, weight: torch.Tensor, rows: int, wide: torch.dtype, gpu: Gpu
) -> None:
    """Allocate and drop what one pass through the chunk loop holds, so that the ledger sees its peak.

    No value is computed. The lists below keep tensors alive as long as ``loss/linear.py`` and
    ``loss/blocks.py`` do, with a ``del`` where those free one: the peak of a chunk is the largest set of
    buffers that is alive at once.

    Args:
        hidden: Hidden states of all rows, ``(N, H)``.
        weight: Weight of the head, ``(V, H)``.
        rows: Rows of a chunk.
        wide: Dtype of the logits and of the sums.
        gpu: The device, which decides between the ways of ``loss/blocks.py``.
    """
    width, vocabulary = weight.shape[1], weight.shape[0]
    taken = hidden.new_empty(rows, width)  # the chunk's rows of the hidden states
    if hidden.dtype == wide:
        # Products: the chunk's logits, in whose place their gradient is made, and the gradient of its rows.
        buffers = [hidden.new_empty(rows, vocabulary), torch.empty_like(taken)]
    elif gpu.name == "cpu":
        # _Rounded: logits stay in 16 bits and are widened in slices, of a few rows for the cross entropy and
        # of a part of the vocabulary for the weight's gradient.
        part = min(vocabulary, max(1, CACHED_BYTES // (2 * width)))
        block = min(rows, max(1, CACHED_BYTES // (4 * vocabulary)))
        buffers = [hidden.new_empty(rows, vocabulary), hidden.new_empty(block, vocabulary, dtype=wide)]
        gradient = [torch.empty_like(taken), torch.empty_like(taken, dtype=wide)]  # of the rows, then wide
        del gradient
        buffers += [hidden.new_empty(part, width), hidden.new_empty(part, width, dtype=wide)]
    else:
        logits = hidden.new_empty(rows, vocabulary, dtype=wide)
        # _Mixed. For the rows' gradient: the logits' gradient cast to 16 bits, and the product.
        buffers = [logits, hidden.new_empty(rows, vocabulary), torch.empty_like(taken, dtype=wide)]
        del buffers[1:]
        # For the weight's gradient, one part of the vocabulary after the other: the cast, and the product.
        part = min(vocabulary, max(1, 16 * CACHED_BYTES // width))
        buffers += [hidden.new_empty(rows, part), hidden.new_empty(part, width, dtype=wide)]
        del buffers[1:]
        if hidden.shape[0] > rows:  # a chunk's logits stay until the next chunk's logits exist
            buffers.append(torch.empty_like(logits))
        del logits
    del buffers, taken


# --- ranks that share rows -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeGroup(SequenceGroup):
    """The first of several ranks that share rows; ``ledger`` records its exchanges."""

    ledger: Ledger

    def exchange(self, rows: torch.Tensor) -> Any:
        """Return a new tensor like ``rows``, in the forward and in the backward."""
        return _Exchange.apply(rows, self.ledger)


class _Exchange(torch.autograd.Function):
    """A new tensor like the given one; the forward and the backward each record an exchange."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ledger: Ledger) -> torch.Tensor:
        ctx.ledger = ledger
        received = torch.empty_like(rows)
        ledger.note(EXCHANGE, (rows,), (received,))
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Exchange.forward(ctx, grads[0].contiguous(), ctx.ledger), None


@contextmanager
def micro_batch(model: Any, run: Run, ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Context in which the model's forward is that of one rank: yields its arguments.

    Where ranks share rows, they are the rank's part of the batch, as ``loss/part.py`` cuts it.

    Raises:
        UnsupportedModelError: If the model's attention cannot be run on a part.
        ValueError: If ``cp`` does not divide the query heads.
    """
    rows, each = run.micro_batch_size, -(-run.seq_length // run.cp)
    ids = torch.zeros((rows, each), dtype=torch.int64, device="meta")
    if not run.shares_rows:
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids) if run.attention_mask else None}
        return
    check_shareable(model, run.cp)
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            "the loss of a mixture's router is not computed where ranks share rows: plan with "
            "output_router_logits=False in the config, and call prepare_loss(model, router_loss='off')"
        )
    positions = torch.zeros((rows, each * run.cp), dtype=torch.int64, device="meta")
    padding = torch.ones_like(positions, dtype=torch.bool) if run.attention_mask else None
    whole = WholeRows(
        group=FakeGroup("fake", run.cp, 0, ledger),
        length=each * run.cp,
        position_ids=positions,
        rows=None,
        padding=padding,
        filler=each * run.cp - run.seq_length,
    )
    mask = torch.ones_like(positions if padding is None else padding)
    before = attention_of(model)
    try:
        share_attention(model)
        with part_of_rows(whole):
            yield {"input_ids": ids, "position_ids": torch.zeros_like(ids), "attention_mask": mask}
    finally:
        model.set_attn_implementation(before)


# --- experts ---------------------------------------------------------------------------------------------


@contextmanager
def grouped_experts(model: Any, run: Run, ledger: Ledger) -> Iterator[None]:
    """Context in which a model on the meta device computes its experts in groups, a rank its own.

    transformers' exchange between ranks asks how many tokens go where, which a meta tensor cannot answer, so
    its operations are reproduced here with equal shares. All changes to the model are undone at the end.

    Raises:
        UnsupportedModelError: If transformers has no plan by which ranks share out the model's experts.
        ValueError: If ``ep_size`` does not divide them.
    """
    changed: dict[str, Any] = switchable_experts(model)
    placed = experts_to_place(model) if run.ep_size > 1 else {}
    if run.ep_size > 1 and not placed:
        raise UnsupportedModelError(
            "transformers has no plan by which ranks share out experts of "
            f"{model.config.model_type!r}: plan it with ep_size=1"
        )
    if uneven := [number for number in placed.values() if number % run.ep_size]:
        raise ValueError(f"ep_size={run.ep_size} does not divide the {uneven[0]} experts of a layer")
    before = {name: dict(vars(module)) for name, module in changed.items()}
    try:
        for name, module in changed.items():
            module.__dict__["forward"] = partial(experts_forward(module, "grouped_mm"), module)
            if name in placed:
                _share_out(module, run.ep_size, ledger)
        yield
    finally:
        for name, module in changed.items():
            module.__dict__ = before[name]


def _share_out(experts: Any, ep_size: int, ledger: Ledger) -> None:
    """Cut a module down to one rank's experts and send tokens to theirs, as ``_expert_parallel`` does."""
    own = {
        name: nn.Parameter(p.new_empty(len(p) // ep_size, *p.shape[1:]), requires_grad=p.requires_grad)
        for name, p in experts._parameters.items()
        if p is not None
    }
    ledger.ignore(own.values())
    total, compute = experts.num_experts, experts.__dict__["forward"]
    vars(experts).update(_parameters=own, num_experts=total // ep_size, _is_expert_parallel=True)
    experts.__dict__["forward"] = partial(_by_travelling, compute, total, ledger)


def _by_travelling(
    compute: Callable[..., torch.Tensor],
    num_experts: int,
    ledger: Ledger,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The operations of transformers' exchange of tokens, if each rank gets as many tokens as it sends."""
    expert_ids = top_k_index.reshape(-1)
    order = torch.argsort(expert_ids)
    sent = hidden_states[order // top_k_index.shape[-1]]
    torch.zeros(num_experts, dtype=torch.int64, device=sent.device).scatter_add_(
        0, expert_ids, torch.ones_like(expert_ids)
    )
    received: torch.Tensor = _Exchange.apply(sent, ledger)
    del sent
    # Named, because transformers' code holds on to each of them until it has combined the results.
    ids = torch.empty_like(expert_ids).unsqueeze(-1)
    weights = torch.ones_like(ids, dtype=received.dtype)
    computed = compute(received, ids, weights)
    result: torch.Tensor = _Exchange.apply(computed, ledger)
    by_token = torch.empty_like(result)
    by_token[order] = result
    by_token = by_token.view(*top_k_weights.shape, hidden_states.shape[-1])
    return (by_token * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)

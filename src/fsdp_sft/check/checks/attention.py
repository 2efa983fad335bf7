"""How fast attention runs, and how long the smallest operation takes: for the planner."""

from typing import Any

import torch
from torch.nn import functional as F

from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.mechanism import Check, Outcome
from fsdp_sft.check.pace import all_at_once, seconds_of, slow_ranks, slow_troubles
from fsdp_sft.check.work import said_flops

_TOKENS, _ON_CPU = 4096, 256
_OPERATIONS = 64
_FAILS, _WARNS = 0.85, 0.95


def _run(cluster: Cluster) -> Outcome:
    heads, width = _heads(cluster.asked.config)
    tokens = _TOKENS if cluster.has_own_clock else _ON_CPU
    dtype = torch.bfloat16 if cluster.has_own_clock else torch.float32
    query = torch.ones(1, heads, tokens, width, device=cluster.device, dtype=dtype, requires_grad=True)
    small = torch.ones(64, device=cluster.device)

    def attend() -> None:
        out = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        out.sum().backward()
        query.grad = None

    def operate() -> None:
        for _ in range(_OPERATIONS):
            small.add_(0.0)

    # Forward: two products of which a causal kernel skips half. Backward: two and a half times as much.
    flops = 3.5 * 2 * 2.0 * heads * tokens * tokens * width / 2
    least = 0.05 * cluster.scale
    _, slow = slow_ranks(cluster, attend, flops, "timing attention", at_least=least, warns=_WARNS)

    def measure() -> tuple[float, float]:
        device = cluster.device
        own = flops / seconds_of(attend, device, at_least=least)
        return own, seconds_of(operate, device, at_least=least / 2) / _OPERATIONS

    found = all_gather_objects(all_at_once(measure, "timing attention"))
    rate, operation = min(one for one, _ in found), max(one for _, one in found)
    named = str(dtype).removeprefix("torch.")
    said = f"{said_flops(rate)} a rank, {operation * 1e6:.3g} us an operation"
    measured = {"flops_per_second": rate, "dtype": named, "operation_seconds": operation}
    return Outcome(said, slow_troubles(cluster, slow, "attention runs", fails=_FAILS), measured)


def _heads(config: Any | None) -> tuple[int, int]:
    """(number of heads, width of each)."""
    text = None if config is None else config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    if text is None or not isinstance(heads, int):
        return 32, 128
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, int(width)


CHECK = Check("attention", "is attention on each device as fast as on the others?", 90, 4, _run)

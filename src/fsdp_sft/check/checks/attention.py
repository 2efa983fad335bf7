"""How fast attention runs, and how long the smallest operation takes: for the planner."""

from typing import Any

import torch
from torch.nn import functional as F

from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.mechanism import Check, Outcome
from fsdp_sft.check.pace import all_at_once, seconds_of
from fsdp_sft.check.work import said_flops

_TOKENS, _ON_CPU = 4096, 256
_OPERATIONS = 64


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

    def measure() -> tuple[float, float]:
        device, least = cluster.device, 0.05 * cluster.scale
        # Forward: two products of which a causal kernel skips half. Backward: two and a half times as much.
        flops = 3.5 * 2 * 2.0 * heads * tokens * tokens * width / 2
        own = flops / seconds_of(attend, device, at_least=least)
        return own, seconds_of(operate, device, at_least=least / 2) / _OPERATIONS

    found = all_gather_objects(all_at_once(measure, "timing attention"))
    rate, operation = min(one for one, _ in found), max(one for _, one in found)
    named = str(dtype).removeprefix("torch.")
    said = f"{said_flops(rate)} a rank, {operation * 1e6:.3g} us an operation"
    return Outcome(said, measured={"flops_per_second": rate, "dtype": named, "operation_seconds": operation})


def _heads(config: Any | None) -> tuple[int, int]:
    """(number of heads, width of each)."""
    text = None if config is None else config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    if text is None or not isinstance(heads, int):
        return 32, 128
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, int(width)


CHECK = Check("attention", "how fast does attention run?", 90, 3, _run)

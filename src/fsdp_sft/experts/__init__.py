"""The experts of a mixture: the implementation that computes them, and their load, counted and balanced."""

from fsdp_sft.experts.bias import update_router_bias
from fsdp_sft.experts.choice import prepare_experts
from fsdp_sft.experts.counter import ExpertCounter, LateLoad, counter_of, watch_experts
from fsdp_sft.experts.load import ExpertLoad

__all__ = [
    "ExpertCounter",
    "ExpertLoad",
    "LateLoad",
    "counter_of",
    "prepare_experts",
    "update_router_bias",
    "watch_experts",
]

"""What the experts of a mixture are given: counted, drawn, and evened out by a bias."""

from fsdp_sft.experts.bias import update_router_bias
from fsdp_sft.experts.counter import ExpertCounter, LateLoad, counter_of, watch_experts
from fsdp_sft.experts.load import ExpertLoad
from fsdp_sft.experts.picture import plot_expert_load

__all__ = [
    "ExpertCounter",
    "ExpertLoad",
    "LateLoad",
    "counter_of",
    "plot_expert_load",
    "update_router_bias",
    "watch_experts",
]

"""The experts of a mixture: the implementation that computes them, and how many tokens each is given."""

from fsdp_sft.experts.choice import prepare_experts as prepare_experts
from fsdp_sft.experts.counter import (
    ExpertCounter as ExpertCounter,
    ExpertLoad as ExpertLoad,
    counter_of as counter_of,
    watch_experts as watch_experts,
)

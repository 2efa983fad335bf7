"""AdamW for bfloat16 parameters with stochastic rounding, which loses no small update on average."""

from fsdp_sft.optimizer.adamw import CHUNK, StochasticAdamW, working_bytes

__all__ = ["CHUNK", "StochasticAdamW", "working_bytes"]

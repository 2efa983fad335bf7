"""AdamW for parameters of 16 bits: it rounds by chance, and so loses no small step on average."""

from fsdp_sft.optimizer.adamw import CHUNK, StochasticAdamW, working_bytes

__all__ = ["CHUNK", "StochasticAdamW", "working_bytes"]

"""Several rows in one sequence: packing, collation, a distributed sampler, streams, and a check of the model.

A *row* is one conversation, a *pack* several rows joined into one sequence, and a *round* one pack for each
rank. Tokens of a row must not attend to other rows of their pack. This depends on the model, and
``verify_packing`` measures it.
"""

from fsdp_sft.errors import PackingError
from fsdp_sft.sampling.packing.bins import pack_lengths
from fsdp_sft.sampling.packing.collator import PackedCollator, row_sizes
from fsdp_sft.sampling.packing.sampler import PackedSampler, attention_cost
from fsdp_sft.sampling.packing.stream import PackedStream
from fsdp_sft.sampling.packing.verify import PackingReport, verify_at_first_use, verify_packing

__all__ = [
    "PackedCollator",
    "PackedSampler",
    "PackedStream",
    "PackingError",
    "PackingReport",
    "attention_cost",
    "pack_lengths",
    "row_sizes",
    "verify_at_first_use",
    "verify_packing",
]

"""Several rows in one sequence: packing, collation, a distributed sampler, streams, and a check of the model.

Rows stay apart only if the model keeps them apart; ``verify_packing`` measures whether it does.
"""

from fsdp_sft.errors import PackingError
from fsdp_sft.packing.bins import pack_lengths
from fsdp_sft.packing.collator import PackedCollator, row_sizes
from fsdp_sft.packing.cost import attention_cost
from fsdp_sft.packing.first_use import Verify, check_verify, verify_at_first_use
from fsdp_sft.packing.sampler import PackedSampler
from fsdp_sft.packing.stream import PackedStream
from fsdp_sft.packing.verify import PackingReport, verify_packing

__all__ = [
    "PackedCollator",
    "PackedSampler",
    "PackedStream",
    "PackingError",
    "PackingReport",
    "Verify",
    "attention_cost",
    "check_verify",
    "pack_lengths",
    "row_sizes",
    "verify_at_first_use",
    "verify_packing",
]

"""Several data sets in one order: of data sets with a length, and of streams."""

from fsdp_sft.mixing.sampler import MixedSampler as MixedSampler
from fsdp_sft.mixing.stream import MixedStream as MixedStream

"""Mix several data sets in one order: data sets with a length, or streams."""

from fsdp_sft.sampling.mixing.sampler import MixedSampler as MixedSampler
from fsdp_sft.sampling.mixing.stream import MixedStream as MixedStream

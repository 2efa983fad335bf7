"""Shard a model with FSDP2 block by block, compile its blocks, and describe what each rank holds."""

from fsdp_sft.shard.apply import shard_model as shard_model
from fsdp_sft.shard.compile import compile_blocks as compile_blocks
from fsdp_sft.shard.describe import describe_sharding as describe_sharding

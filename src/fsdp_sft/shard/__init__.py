"""Shard a model with FSDP2 block by block, compile its blocks, and describe what each rank holds."""

"""Checkpoints of other tools, read without running anything that is in them."""

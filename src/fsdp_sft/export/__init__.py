"""Hugging Face folders and adapters out of sharded models: what ``save_pretrained`` would write."""

from fsdp_sft.export.adapter import export_adapter
from fsdp_sft.export.hf import export_hf

__all__ = ["export_adapter", "export_hf"]

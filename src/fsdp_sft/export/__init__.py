"""Hugging Face folders and adapters out of sharded models: what ``save_pretrained`` would write."""

from fsdp_sft.export.adapter import export_adapter
from fsdp_sft.export.hf import export_hf
from fsdp_sft.export.target import check_export

__all__ = ["check_export", "export_adapter", "export_hf"]

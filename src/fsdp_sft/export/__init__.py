"""Export of sharded models and adapters to Hugging Face folders, as ``save_pretrained`` would write them."""

from fsdp_sft.export.adapter import export_adapter
from fsdp_sft.export.check import check_export
from fsdp_sft.export.hf import export_hf

__all__ = ["check_export", "export_adapter", "export_hf"]

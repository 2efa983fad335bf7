"""Export of sharded models and adapters to Hugging Face folders, as ``save_pretrained`` would write them."""

from fsdp_sft.export.hf import check_export, export_adapter, export_hf, iter_hf_tensors

__all__ = ["check_export", "export_adapter", "export_hf", "iter_hf_tensors"]

"""Export of sharded models and adapters to Hugging Face folders, as ``save_pretrained`` would write them."""

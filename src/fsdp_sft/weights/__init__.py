"""Stream Hugging Face safetensors checkpoints straight into float32 shards.

``build_meta_model`` builds a model without memory, ``shard_model`` cuts it up, and ``load_weights`` fills the
shards. The headers of the checkpoint are read first. Every parameter is then traced back, through
transformers' renames and conversions, to the bytes that it is made of (``provenance``), and each rank reads
only the bytes of its own shards.
"""

from fsdp_sft.weights.load import LoadReport as LoadReport, load_weights as load_weights
from fsdp_sft.weights.meta import build_meta_model as build_meta_model

__all__ = [
    "LoadReport",
    "build_meta_model",
    "load_weights",
]

"""Attention of a pack that computes nothing between its rows, with torch alone.

transformers gives its ``"sdpa"`` attention a dense mask for a pack, and the kernels then compute every pair
of tokens and discard most of them: a pack of S tokens in N rows costs S^2 instead of about S^2 / N. Here the
rows are read off that mask, and attention is computed row by row.
"""

from fsdp_sft.attention.varlen.use import use_varlen_attention

__all__ = ["use_varlen_attention"]

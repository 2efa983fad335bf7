"""Attention of a pack that computes nothing between its rows, with torch alone.

transformers gives its ``"sdpa"`` attention a dense mask for a pack, and the kernels then compute every pair
of tokens and discard most of them: a pack of S tokens in N rows costs S^2 instead of about S^2 / N. Here the
rows are read off that mask, and attention is computed row by row.
"""

from typing import Any

from torch import nn

from fsdp_sft._compat.attention import attention_of
from fsdp_sft._model.view import original_class
from fsdp_sft.errors import UnsupportedModelError


def use_varlen_attention(model: nn.Module) -> None:
    """Make a model's attention compute only within the rows of a pack, with unchanged results.

    It takes effect for batches of ``PackedCollator``: ``position_ids`` that restart, no attention mask, no
    cache. On CUDA (compute capability 8.0 or later, float16 or bfloat16) attention is then one call of
    torch's varlen flash attention; elsewhere scaled_dot_product_attention runs row by row. All other calls
    (padded batches, generation) and all other masks go to transformers' ``"sdpa"`` as before, and so does
    compiled code where there is no flash attention.

    It may be called at any time: before or after weights are loaded, and blocks sharded, checkpointed or
    compiled. It sets ``attn_implementation`` to ``"sdpa_varlen"`` for this process; exported configs do not
    have it. ``model.set_attn_implementation("sdpa")`` undoes it.

    Args:
        model: A transformers model that has ``"sdpa"`` attention.

    Raises:
        TypeError: If the model is not from transformers.
        UnsupportedModelError: If its attention cannot be replaced, or it has no ``"sdpa"``.

    Memory: While rows are found, once for each forward and kind of mask, a few bool tensors of 512 x S
        instead of the mask of S x S.

    Example:
        >>> fs.use_varlen_attention(model)
        >>> model.config._attn_implementation
        'sdpa_varlen'
        >>> report = fs.verify_packing(model, max_length=64)
    """
    name = original_class(model).__name__
    if not callable(getattr(model, "set_attn_implementation", None)):
        raise TypeError(f"use_varlen_attention needs a transformers model, got {name}")
    from transformers import AttentionInterface, AttentionMaskInterface

    from fsdp_sft.attention.varlen import attention

    AttentionInterface.register(attention.IMPLEMENTATION, attention.attend_by_row)
    AttentionMaskInterface.register(attention.IMPLEMENTATION, attention.make_mask)
    set_attention: Any = model.set_attn_implementation
    before = attention_of(model)
    for wanted in ("sdpa", attention.IMPLEMENTATION):
        try:
            set_attention(wanted)
            reason = ""
        except ValueError as error:
            reason = f": {error}"
        if attention_of(model) != wanted:
            raise UnsupportedModelError(
                f"{name} runs {before} attention, and transformers does not let it run 'sdpa', nor what "
                f"would replace it; leave use_varlen_attention out{reason}"
            )

"""Layouts of older checkpoints, which loading has to convert."""

from typing import Any


def register_layout(layout: str) -> None:
    """Give Llama a conversion mapping, as transformers does for models whose checkpoints look otherwise."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import (
        Chunk,
        Concatenate,
        ConversionOps,
        Interleave,
        PermuteForRope,
        Transpose,
        WeightConverter,
        WeightRenaming,
    )

    class Twice(ConversionOps):
        """Computes, which no tracing of elements can follow."""

        def __init__(self, factor: float = 2.0) -> None:
            self.factor = factor

        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
            (tensors,) = input_dict.values()
            tensor = tensors[0] if isinstance(tensors, list) else tensors
            return {target_patterns[0]: tensor * self.factor}

        @property
        def reverse_op(self) -> ConversionOps:
            return Twice(1 / self.factor)

    gate_up = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    qk = ["self_attn.q_proj.weight", "self_attn.k_proj.weight"]
    layouts = {
        "chunk": [WeightConverter("mlp.gate_up.weight", gate_up, [Chunk(dim=0)])],
        "chunk-columns": [WeightConverter("mlp.gate_up.weight", gate_up, [Chunk(dim=1)])],
        "interleave": [WeightConverter("mlp.gate_up.weight", gate_up, [Interleave(dim=0), Chunk(dim=0)])],
        "concatenate": [
            WeightConverter(
                ["mlp.down_a.weight", "mlp.down_b.weight"], "mlp.down_proj.weight", [Concatenate(0)]
            )
        ],
        "concatenate-columns": [
            WeightConverter(
                ["mlp.down_a.weight", "mlp.down_b.weight"], "mlp.down_proj.weight", [Concatenate(1)]
            )
        ],
        "transpose": [WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Transpose(0, 1)])],
        "rope": [WeightConverter("self_attn.wq.weight", qk[0], [PermuteForRope()])],
        "computed": [WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Twice()])],
        "renamed": [WeightRenaming(r"^transformer\.blocks\.", "model.layers.")],
    }
    conversion_mapping.register_checkpoint_conversion_mapping(
        "LlamaForCausalLM", layouts[layout], overwrite=True
    )

"""Layouts of older checkpoints, which loading has to convert."""


def register_layout(layout: str) -> None:
    """Give Llama a conversion mapping, as transformers does for models whose checkpoints look otherwise."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import (
        Chunk,
        Concatenate,
        Interleave,
        PermuteForRope,
        Transpose,
        WeightConverter,
        WeightRenaming,
    )

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
        "renamed": [WeightRenaming(r"^transformer\.blocks\.", "model.layers.")],
    }
    conversion_mapping.register_checkpoint_conversion_mapping(
        "LlamaForCausalLM", layouts[layout], overwrite=True
    )

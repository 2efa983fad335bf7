#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0), packed rows in gpt-oss, AFMoE and Granite MoE hybrid without flash attention.
#
# One would expect: since transformers tells rows of a pack by position_ids that begin anew at 0 ("packed sequence
#   format", without an attention mask), every rotary decoder that takes position_ids keeps the rows apart under each
#   attention implementation, as Llama and Qwen3 MoE do.
# What happens: the masks are made by one function for all models, but each model decides what it hands over. These
#   three hand over no position_ids, so that the rows see each other with eager attention (and sdpa, where the model
#   has it), while their rotations do begin anew. Nothing is said; the loss looks like one.
# Who is hit: who packs rows for these models on anything but flash attention, which reads position_ids itself, and
#   who concludes from a test with Llama that packs are safe for all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 2>/dev/null
"$folder/venv/bin/python" - <<'PY' 2>/dev/null
import sys

import torch
import transformers as tf

print("torch", torch.__version__, "transformers", tf.__version__)
common = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
common |= {"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0}
moe = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
configs = {
    "Llama": tf.LlamaConfig(**common),
    "Qwen3 MoE": tf.Qwen3MoeConfig(num_experts=4, head_dim=16, **moe, **common),
    "gpt-oss": tf.GptOssConfig(num_local_experts=4, head_dim=16, num_experts_per_tok=2, **common),
    "AFMoE": tf.AfmoeConfig(num_experts=4, head_dim=16, num_dense_layers=1, **moe, **common),
    "Granite MoE hybrid": tf.GraniteMoeHybridConfig(
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=64,
        layer_types=["attention"] * 2, position_embedding_type="rope", **common,
    ),
}
generator = torch.Generator().manual_seed(0)
ids = torch.randint(3, 96, (1, 24), generator=generator)
positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
mixed = {}
for name, config in configs.items():
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # so that tokens matter to each other
        parameter.data.mul_(5 if parameter.dim() > 1 else 1)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 10:]
        alone = model(input_ids=ids[:, 10:], use_cache=False).logits
        joined = model(input_ids=ids, use_cache=False).logits[:, 10:]
    off, apart = (float((other - alone).norm() / alone.norm()) for other in (packed, joined))
    mixed[name] = off > 1e-3
    print(f"{name:20} second row packed against alone: {off:.1e} (simply joined: {apart:.1e})")
same = mixed == {name: name not in ("Llama", "Qwen3 MoE") for name in configs}
print("as described" if same else "CHANGED")
sys.exit(not same)
PY

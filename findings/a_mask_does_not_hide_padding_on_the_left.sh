#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0), rows padded on the left, with their attention_mask.
#
# One would expect: a mask hides padding, so that a row has the same logits on either side of it, as generate shows for
#   all of these models.
# What happens: Llama, OPT and Mamba do so. GPT-2, GPT-BigCode (StarCoder) and GPT-Neo count positions from the first
#   column unless the caller passes position_ids, which generate does and no collator for training; RecurrentGemma runs
#   its recurrence through the padding.
# Who is hit: who trains such a model with tokenizer.padding_side = "left". No error, another loss.
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
gpt = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
llama = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
opt = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
neo = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]], "vocab_size": 64}
griffin = llama | {"num_hidden_layers": 3, "lru_width": 32, "num_key_value_heads": 1, "attention_window_size": 16}
mamba = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 8}
models = {
    "Llama": (tf.LlamaConfig(**llama), False),
    "OPT": (tf.OPTConfig(**opt), False),
    "Mamba": (tf.MambaConfig(**mamba), False),
    "GPT-2": (tf.GPT2Config(**gpt), True),
    "GPT-BigCode": (tf.GPTBigCodeConfig(**gpt), True),
    "GPT-Neo": (tf.GPTNeoConfig(**neo), True),
    "RecurrentGemma": (tf.RecurrentGemmaConfig(**griffin), True),
}
row = torch.randint(8, 60, (1, 12), generator=torch.Generator().manual_seed(0))
padding, ones = torch.zeros(1, 6, dtype=torch.long), torch.ones_like(row)
same = True
for name, (config, moves) in models.items():
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        alone = model(input_ids=row, attention_mask=ones).logits
        left = model(input_ids=torch.cat([padding, row], 1), attention_mask=torch.cat([padding, ones], 1)).logits[:, 6:]
        right = model(input_ids=torch.cat([row, padding], 1), attention_mask=torch.cat([ones, padding], 1)).logits[:, :12]
    by_left, by_right = (float((x - alone).norm() / alone.norm()) for x in (left, right))
    print(f"{name:15} logits of the row moved by padding on the left {by_left:.1e}, on the right {by_right:.1e}")
    same &= (by_left > 1e-3) == moves and by_right < 1e-4
print("as described" if same else "CHANGED")
sys.exit(not same)
PY

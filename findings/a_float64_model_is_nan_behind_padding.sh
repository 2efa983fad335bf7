#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0), eager attention in float64, rows padded on the left; 5.24.0 does the same.
#
# One would expect: a model in float64 is the reference for the same model in float32: slower, and with the same loss to six
#   digits, padded or not, whichever attention computes it.
# What happens: eager attention adds a mask of finfo(float64).min and takes the softmax in float32, where that number is -inf.
#   A token of padding on the left sees nothing, so that its row of the softmax is NaN, and in the next layer so are keys
#   and values that real tokens multiply by 0: the whole row's loss is NaN. In float32 the mask is a finite number, and with
#   sdpa both dtypes agree. Padded on the right nothing is NaN, as each token sees the first.
# Who is hit: references and gradient checks in float64 of models that only have eager attention (Gemma 2), or are asked for it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy 2>/dev/null
cat > "$folder/program.py" <<'PY'
import math
import sys

import torch
import transformers
from transformers import Gemma2Config, LlamaConfig

sizes = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))


def loss(config, attention, dtype, side):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    mask = torch.ones_like(ids)
    mask[0, slice(0, 4) if side == "left" else slice(8, None)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :5] = -100  # no target is predicted from padding
    with torch.no_grad():
        return model.to(dtype)(input_ids=ids, attention_mask=mask, labels=labels).loss.item()


print("torch", torch.__version__, "transformers", transformers.__version__)
holds = True
for config, attention in (
    (LlamaConfig(**sizes), "eager"),
    (Gemma2Config(**sizes), "eager"),
    (LlamaConfig(**sizes), "sdpa"),
):
    for side in ("right", "left"):
        single, double = (loss(config, attention, dtype, side) for dtype in (torch.float32, torch.float64))
        print(f"{type(config).__name__:12} {attention:5} padded on the {side:5}: float32 {single:.6f}, float64 {double:.6f}")
        is_nan = attention == "eager" and side == "left"
        holds &= math.isfinite(single) and math.isnan(double) == is_nan and (is_nan or abs(single - double) < 1e-5)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }

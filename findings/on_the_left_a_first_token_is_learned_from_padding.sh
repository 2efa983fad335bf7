#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0), a row whose tokens are all labelled (labels are the ids, -100 on padding), padded on
# either side, with its attention_mask.
#
# One would expect: a Llama hides padding wherever it stands, and padding has no label, so that the loss of the row is the
#   same on both sides, and that of the row alone.
# What happens: labels are shifted by the model: on the right, as alone, nothing predicts the first token. On the left the
#   position in front of it is padding, whose output is scored for it: one target more, of a position that attends to
#   nothing but itself, and a mean over one token more.
# Who is hit: who trains whole texts, or packs of one row, with padding_side = "left". Chats are spared: the prompt has no
#   labels. No error; with short rows the loss is visibly another.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 2>/dev/null
"$folder/venv/bin/python" - <<'PY' 2>/dev/null
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

print("transformers", transformers.__version__, "torch", torch.__version__)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
model = LlamaForCausalLM(config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
ids = torch.randint(1, 64, (1, 6))
losses = {}
for side, padding in (("alone", (0, 0)), ("right", (0, 3)), ("left", (3, 0))):
    row, mask = (torch.nn.functional.pad(one, padding) for one in (ids, torch.ones_like(ids)))
    labels = row.masked_fill(mask == 0, -100)
    with torch.no_grad():
        losses[side] = float(model(input_ids=row, attention_mask=mask, labels=labels).loss)
    counted = int((labels[:, 1:] != -100).sum())
    print(f"padding {side}: loss {losses[side]:.4f} over {counted} targets")
same = abs(losses["right"] - losses["alone"]) < 1e-5 and abs(losses["left"] - losses["alone"]) > 1e-2
print("as described" if same else "CHANGED")
sys.exit(not same)
PY

#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0), a config whose pad_token_id is its eos_token_id.
#
# One would expect: the padding token of a config only says what fills rows up; with the usual advice for tokenizers
#   without one (padding is the end of text, labels of padding are -100) every trained token gets a gradient.
# What happens: Llama, Qwen2 and most decoders make their embedding with padding_idx=config.pad_token_id, and torch gives
#   that row no gradient, wherever the token stands. Where each turn ends with EOS, later turns read an embedding
#   that never moves. A head of its own still learns to write the token; a tied one trains the shared row.
# Who is hit: who trains chats of several turns with untied embeddings on such a config. Nothing is said.
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
END = 2
common = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
common |= {"num_key_value_heads": 2, "vocab_size": 64, "eos_token_id": END}
chat = torch.tensor([[5, 6, END, 7, 8, END, 9, 10, END]])  # three turns, nothing of it padding
found = {}
for name, cls in (("Llama", tf.LlamaConfig), ("Qwen2", tf.Qwen2Config)):
    for pad, tied in ((END, False), (3, False), (None, False), (END, True)):
        torch.manual_seed(0)
        config = cls(**common, pad_token_id=pad, tie_word_embeddings=tied)
        model = tf.AutoModelForCausalLM.from_config(config).train()
        model(input_ids=chat, labels=chat).loss.backward()
        rows = model.get_input_embeddings().weight.grad.norm(dim=1)
        found[name, pad, tied] = bool(rows[END] > 0)
        print(f"{name:6} pad_token_id={pad!s:5} tied={tied!s:6} gradient of the row of EOS {rows[END]:.1e}, of token 6 {rows[6]:.1e}")
same = all(moves == (pad != END or tied) for (_, pad, tied), moves in found.items())
print("as described" if same else "CHANGED")
sys.exit(not same)
PY

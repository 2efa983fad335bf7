#!/usr/bin/env bash
# transformers 5.24.0, a type of model that has a config but no class of its own: EXAONE 3, whose model is Llama's.
#
# One would expect: the class that config.json names under "architectures" loads the folder as AutoModelForCausalLM does, and
#   what is loaded can be saved and loaded again.
# What happens: it loads the same values, for it converts the names of the file by the "model_type" there; but its config becomes
#   a LlamaConfig. Saved, the folder has EXAONE's names of weights beside "model_type": "llama", by which no name fits: every weight
#   but the head's is newly initialised, and that is said in a report of a log and by no error. AutoModelForCausalLM keeps the config
#   and makes the same round trip exactly. Sarvam's mixture (Glm4MoeForCausalLM) does the same.
# Who is hit: loaders that take getattr(transformers, config.architectures[0]), as many do to get a class, and export what they
#   have trained: the export holds the weights, and whoever loads it gets random ones.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0 numpy 2>/dev/null
cat > "$folder/program.py" <<'PY'
import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, ExaoneConfig

transformers.logging.set_verbosity_error()
root = sys.argv[1]
torch.manual_seed(0)
small = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = ExaoneConfig(**small, num_attention_heads=4, num_key_value_heads=2)
model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.arange(3, 20)[None]
model.save_pretrained(f"{root}/published")
named = json.load(open(f"{root}/published/config.json"))["architectures"][0]
print("transformers", transformers.__version__)
for cls in (AutoModelForCausalLM, getattr(transformers, named)):
    loaded = cls.from_pretrained(f"{root}/published")
    loaded.save_pretrained(f"{root}/again")
    again = AutoModelForCausalLM.from_pretrained(f"{root}/again")
    kind = json.load(open(f"{root}/again/config.json"))["model_type"]
    same = [torch.equal(one(ids).logits, model(ids).logits) for one in (loaded, again)]
    print(f"{cls.__name__}: loaded the same {same[0]}, saved as {kind}, loaded again the same {same[1]}")
PY
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2> "$folder/log" | tee "$folder/found" || { cat "$folder/log"; exit 1; }
grep -q "^AutoModelForCausalLM: loaded the same True, saved as exaone, loaded again the same True" "$folder/found" \
    && grep -q "^LlamaForCausalLM: loaded the same True, saved as llama, loaded again the same False" "$folder/found" \
    && echo "as described" || { echo "CHANGED"; exit 1; }

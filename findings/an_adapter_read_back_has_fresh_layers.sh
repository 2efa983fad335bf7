#!/usr/bin/env bash
# transformers 5.23.0, peft 0.21.2, torch 2.13.0; transformers 5.24.0 does the same.
#
# One would expect: PeftModel.from_pretrained(base, folder) of what save_pretrained wrote gives the model that was saved.
#   The names in the file are the modules' own, and both calls are peft's.
# What happens: for a Laguna, the adapters of its shared experts come back as fresh ones: 6 of 32 tensors of all-linear
#   here. When it reads an adapter, peft renames its entries as transformers renames those of the published
#   checkpoint, and the pattern for "mlp.shared_expert." (a dot stands for any character) fits "mlp.shared_experts" as
#   well, so the entry ends up under a name that no module has. A DeepSeek-V3, whose shared experts are called the same
#   but need no renaming, reads all of them. peft says so in a warning about missing keys, and loads; without it the
#   model answers almost like the base. merge_and_unload before saving is right.
# Who is hit: LoRA on a model whose published names differ from its modules' by so little; of a DeepSeek-OCR 2 none is read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy 2>/dev/null
cat > "$folder/program.py" <<'PY'
import sys
import tempfile
import warnings

import peft
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAGUNA = {"num_experts": 4, "head_dim": 8, "shared_expert_intermediate_size": 16}
DEEPSEEK = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
IDS = torch.arange(3, 27).view(1, 24)
found = {}
for name, more in (("Laguna", LAGUNA), ("DeepseekV3", DEEPSEEK)):
    cls = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    base, saved = tempfile.mkdtemp(), tempfile.mkdtemp()
    cls(cls.config_class(**SIZES, **more)).save_pretrained(base)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(cls.from_pretrained(base), lora).eval()
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:  # as after training
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(saved)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = peft.PeftModel.from_pretrained(cls.from_pretrained(base), saved).eval()
    own, read = dict(model.named_parameters()), dict(again.named_parameters())
    lost = [key for key in own if "lora_" in key and not torch.equal(own[key], read[key])]
    with torch.no_grad():
        apart = (model(IDS).logits - again(IDS).logits).abs().max().item()
    told = any("missing adapter keys" in str(warning.message) for warning in caught)
    layers = sorted({key.split(".layers.")[1].split(".lora_")[0] for key in lost})
    found[name] = (bool(lost), apart > 1e-3, told, all("shared_experts" in layer for layer in layers))
    print(f"{name}: {len(lost)} of {sum('lora_' in key for key in own)} adapter tensors are others, {layers}")
    print(f"    largest difference of a logit {apart:.3f}; a warning about missing keys: {told}")
print("transformers", transformers.__version__, "peft", peft.__version__)
same = found == {"Laguna": (True, True, True, True), "DeepseekV3": (False, False, False, True)}
print("as described" if same else "CHANGED")
sys.exit(not same)
PY
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }

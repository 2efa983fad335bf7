#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0), Trainer with gradient_accumulation_steps; 5.24.0 does the same
# (reported as huggingface/transformers#47688).
#
# One would expect: rows of one length in micro-batches of 2, accumulated 4 times, give the loss and the gradient of one batch
#   of 8, for every model of the library: accumulation was mended years ago, and here all micro-batches have equal weights.
# What happens: Trainer tells a model the number of labels of the whole step, and does not divide by the number of micro-batches
#   where the model is believed to have used it: where its forward takes **kwargs. Nearly all do by now, and only causal LMs use
#   the number. For sequence and token classification (of the first, reward models are made) and for T5 and BART the logged
#   loss and the gradient are those of the batch times the number of micro-batches. Clipping hides it, and so does Adam.
# Who is hit: fine-tuning of such heads with accumulation: comparisons of losses between settings, SGD, thresholds of clipping.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy 2>/dev/null
cat > "$folder/program.py" <<'PY'
import sys

import torch
import transformers
from transformers import LlamaConfig, T5Config, Trainer, TrainerCallback, TrainingArguments

transformers.logging.set_verbosity_error()
draw = torch.Generator().manual_seed(0)
IDS = torch.randint(3, 100, (8, 7), generator=draw)
CLASSES = torch.randint(0, 2, (8,), generator=draw)
LLAMA = LlamaConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=0,
)
T5 = T5Config(
    vocab_size=100,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
KINDS = {
    "LlamaForCausalLM": (LLAMA, IDS),
    "LlamaForSequenceClassification": (LLAMA, CLASSES),
    "LlamaForTokenClassification": (LLAMA, IDS % 2),
    "T5ForConditionalGeneration": (T5, IDS),
}


class Seen(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **others):
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        self.norm = torch.stack(norms).norm().item()

    def on_log(self, args, state, control, logs, **others):
        self.loss = logs.get("loss", getattr(self, "loss", None))


def first_step(name, rows, micro_batches):
    """Loss and norm of the gradient of the first step over all eight rows."""
    config, labels = KINDS[name]
    torch.manual_seed(0)
    model, seen = getattr(transformers, name)(config), Seen()
    options = TrainingArguments(
        output_dir=sys.argv[1],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=micro_batches,
        max_steps=1,
        logging_steps=1,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": ids, "labels": label} for ids, label in zip(IDS, labels, strict=True)]
    Trainer(model, options, train_dataset=data, callbacks=[seen]).train()
    return seen.loss, seen.norm


print("torch", torch.__version__, "transformers", transformers.__version__)
times = {}
for name in KINDS:
    (loss, norm), (other_loss, other_norm) = first_step(name, 8, 1), first_step(name, 2, 4)
    times[name] = round(other_loss / loss, 2), round(other_norm / norm, 2)
    print(f"{name}: loss {loss:.4f} in one batch, {other_loss:.4f} in four; gradient {times[name][1]} times as large")
holds = [*times.values()] == [(1.0, 1.0), (4.0, 4.0), (4.0, 4.0), (4.0, 4.0)]
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
"$folder/venv/bin/python" "$folder/program.py" "$folder/out" 2>"$folder/log" | grep -v "^{" || { cat "$folder/log"; exit 1; }

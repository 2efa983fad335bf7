"""An ordinary loop, in plain PyTorch: one process, one device. `loop_fsdp.py` is the same loop with FSDP2."""

import json

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "Qwen/Qwen2.5-0.5B-Instruct"
with open("examples/data/chats.jsonl") as file:
    rows = [json.loads(line) for line in file]
tokenizer = AutoTokenizer.from_pretrained(path)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)


def collate(rows):
    chats = [row["messages"] for row in rows]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    is_padding = batch["attention_mask"] == 0
    batch["labels"] = batch["input_ids"].masked_fill(is_padding, -100)
    return batch


loader = DataLoader(rows, 2, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step, batch in enumerate(loader, start=1):
    with torch.autocast(device, torch.bfloat16):
        loss = model(**batch.to(device)).loss / 8
    loss.backward()
    if step % 8 == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
model.save_pretrained("out")
tokenizer.save_pretrained("out")

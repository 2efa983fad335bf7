"""The loop of `loop_plain.py` with FSDP2: torchrun --nproc-per-node 8 examples/loop_fsdp.py."""

import json
from time import perf_counter

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import fsdp_sft as fs

path = "Qwen/Qwen2.5-0.5B-Instruct"
with open("examples/data/chats.jsonl") as file:
    rows = [json.loads(line) for line in file]
tokenizer = AutoTokenizer.from_pretrained(path)
job = fs.init_distributed()
model = fs.load_pretrained(path, mesh=fs.build_mesh())
collate = fs.SFTCollator(tokenizer, max_length=4096)
sampler = fs.ResumableSampler(rows)
loader = DataLoader(rows, 2, sampler=sampler, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
start = perf_counter()
for step, window in enumerate(fs.windows(loader, global_batch=16), start=1):
    result = fs.train_step(model, window, optimizer)
    rate, start = result.num_tokens / (perf_counter() - start), perf_counter()
    if job.is_main:
        print(f"step {step}  loss {result.loss:.4f}  {rate:,.0f} tokens/s")
fs.export_hf(model, "out", tokenizer=tokenizer)

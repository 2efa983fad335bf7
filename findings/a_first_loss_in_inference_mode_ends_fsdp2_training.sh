#!/usr/bin/env bash
# torch 2.13.0, FSDP2 (fully_shard) on 2 gloo ranks; torch 2.15.0 does the same.
#
# One would expect: a loss before training, taken under torch.inference_mode() as many loops take it, leaves the model
#   as it is, like one under no_grad; the mode is for that.
# What happens: that loss is right, and every training step after it fails ("Inplace update to inference tensor"). FSDP2
#   makes the memory of its gathered parameters in the first forward, inside the mode, and keeps it. After one step of
#   training the same evaluation is harmless, so that an evaluation every hundred steps works for months.
# Who is hit: who evaluates or samples under inference_mode before the first step, as at step 0 or after a resume.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy 2>/dev/null
cat > "$folder/program.py" <<'PY'
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


def model_of():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model):
    try:
        model(torch.ones(2, 8)).square().mean().backward()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0]}"
    return "trained"


def look(model, mode):
    try:
        with mode():
            return f"loss {model(torch.ones(2, 8)).square().mean().item():.4f}"
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0]}"


found = []
for mode in (torch.no_grad, torch.inference_mode):
    for before in (True, False):
        model = model_of()
        if not before:
            step(model)
        value = look(model, mode)
        found.append((mode.__name__, before, value, step(model)))
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    for mode, before, value, after in found:
        print(f"{mode} {'before the first step' if before else 'after a step'}: {value}; then: {after[:80]}")
dist.destroy_process_group()
values = {value for _, _, value, _ in found}
after = [after.partition(" outside")[0] for *_, after in found]
broken = "RuntimeError: Inplace update to inference tensor"
same = len(values) == 1 and after == ["trained", "trained", broken, "trained"]
if int(os.environ["RANK"]) == 0:
    print("as described" if same else "CHANGED")
sys.exit(not same)
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py" 2>"$folder/log" ||
    { cat "$folder/log"; exit 1; }

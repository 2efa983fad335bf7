#!/usr/bin/env bash
# torch 2.13.0, FSDP2; 2.15.0 reduces as the policy says.
#
# One would expect: requires_grad_ may change between steps, and the gradients of a layer that was frozen for a while are
#   reduced like those of any other, in the reduce_dtype of its MixedPrecisionPolicy, here float32.
# What happens: a group of parameters takes the dtypes of its reduction once, at the first forward, from those of its
#   parameters that are trained then. A layer that is frozen as a whole in that forward and trained later has none: its
#   gradients are summed over the ranks in the dtype of the computation. With float32 parameters the backward ends in a
#   RuntimeError about dtypes; with bfloat16 ones nothing is said, and small gradients are lost beside large ones.
# Who is hit: gradual unfreezing (a head first, blocks later), and a resume while a layer is frozen; an evaluation before
#   the first step counts as the first forward too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy 2>/dev/null
cat > "$folder/program.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Scale(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, x):
        return x * self.weight


def gradient(dtype, frozen_at_first):
    """Of the first layer, whose gradients are 256 on rank 0 and 1 on the three others."""
    model = nn.Sequential(Scale(dtype), Scale(dtype))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    rows = torch.full((1, 4), 1.0 if rank else 256.0)
    model[0].requires_grad_(not frozen_at_first)
    model(rows).sum().backward()
    model.zero_grad()
    model[0].requires_grad_(True)
    try:
        model(rows).sum().backward()
    except RuntimeError as error:
        return type(error).__name__
    return model[0].weight.grad.full_tensor().tolist()


found = {
    (str(dtype), frozen): gradient(dtype, frozen)
    for dtype in (torch.bfloat16, torch.float32)
    for frozen in (False, True)
}
if rank == 0:
    print("torch", torch.__version__)
    print("the mean of 256, 1, 1 and 1 is 64.75")
    for (dtype, frozen), value in found.items():
        print(f"{dtype} parameters, {'frozen at the first forward' if frozen else 'always trained'}: {value}")
trained, thawed, wide, raised = found.values()
same = (trained, wide, raised) == ([65.0] * 4, [64.75] * 4, "RuntimeError") and 64.0 in thawed
if rank == 0:
    print("as described" if same else "CHANGED")
sys.stdout.flush()
dist.barrier() if same else None
sys.exit(not same)
PY
"$folder/venv/bin/torchrun" --nproc-per-node 4 "$folder/program.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }

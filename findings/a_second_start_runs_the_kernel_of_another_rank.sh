#!/usr/bin/env bash
# torch 2.13.0, a compiled function of DTensors whose shards are unequal; 2.15.0 does the same.
#
# One would expect: torch.compile keeps its kernels on the disk by what they were compiled for, so that a second start of
#   the same job finds them and is faster. Ranks may share that folder, as they do by default.
# What happens: the key of the cached code has the DTensor's whole shape and not the shape of this rank's part. Where ranks do
#   not divide a dimension, all of them find the kernel of whichever rank wrote last, which asserts its own size on the others:
#   the first start works, and every later one ends in an AssertionError on some ranks. A folder of kernels for each rank
#   (TORCHINDUCTOR_CACHE_DIR) does not.
# Who is hit: optimizers that compile their update of sharded parameters, as torchao's 8-bit and fp8 ones do, with a vocabulary
#   or width that the ranks do not divide; a job that is killed cannot be resumed on the same machine.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy setuptools 2>/dev/null
cat > "$folder/program.py" <<'PY'
import os
import sys

if sys.argv[2] == "apart":
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{sys.argv[1]}/rank-{os.environ['RANK']}"
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))


@torch.compile(fullgraph=True, dynamic=False)
def update(weight, gradient):
    return weight - 0.1 * gradient / (gradient * gradient + 1)


whole = torch.arange(36.0).view(9, 4)
weight, gradient = (distribute_tensor(t, mesh, [Shard(0)]) for t in (whole, torch.ones(9, 4)))
try:
    said = f"right: {torch.allclose(update(weight, gradient).to_local(), weight.to_local() - 0.05)}"
except AssertionError as error:
    said = str(error).splitlines()[0]
print(f"rank {dist.get_rank()} with {len(weight.to_local())} rows: {said}", file=open(f"{sys.argv[1]}/{dist.get_rank()}", "w"))
dist.barrier()
dist.destroy_process_group()
PY
"$folder/venv/bin/python" -c "import torch; print('torch', torch.__version__)"
for where in shared apart; do
    cache="$folder/$where"
    mkdir "$cache"
    for start in first second; do
        TORCHINDUCTOR_CACHE_DIR="$cache" OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
            "$folder/program.py" "$cache" "$where" > "$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
        echo "$start start, kernels $where: $(cat "$cache/0" "$cache/1" | paste -sd ';')" | tee -a "$folder/found"
    done
done
grep -Eq "^second start, kernels shared:.*expected size [45]==[45]" "$folder/found" && grep -q "^second start, kernels apart:.*True.*True" "$folder/found" \
    && echo "as described" || { echo "CHANGED"; exit 1; }

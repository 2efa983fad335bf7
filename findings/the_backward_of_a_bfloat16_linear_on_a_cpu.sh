#!/usr/bin/env bash
# torch 2.13.0, a bfloat16 nn.Linear on a CPU that oneDNN has no bfloat16 products for: x86 without AVX-512 (most AMD
# EPYC before Zen 4, most laptops), or any CPU with torch.backends.mkldnn off, as here.
#
# One would expect: bfloat16 is slower there than float32 by some factor, and alike for the three products of a layer,
#   which have the same number of operations: backward about twice the forward, as in float32.
# What happens: the forward (hidden @ weight.T) multiplies along rows of both and is some times slower than float32; the
#   gradient of the input (grad @ weight) goes through memory against its order and takes ten times as long as
#   the forward, and more with wider layers.
# Who is hit: who tries a bfloat16 recipe on such a machine, in CI for instance: the forward looks usable, the
#   first backward seems to hang. Float32 is faster there by far.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy 2>/dev/null
"$folder/venv/bin/python" - <<'PY' 2>/dev/null
import statistics
import sys
import time

import torch

torch.set_num_threads(1)
torch.backends.mkldnn.set_flags(False)
print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability(), "without oneDNN")


def seconds(product):
    product()
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        product()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


ratios = {}
for dtype in (torch.float32, torch.bfloat16):
    hidden, weight, grad = (torch.randn(shape).to(dtype) for shape in ((64, 1024), (4096, 1024), (64, 4096)))
    forward = seconds(lambda: hidden @ weight.T)
    backward = seconds(lambda: grad @ weight)
    ratios[dtype] = backward / forward
    print(f"{dtype}: forward {forward * 1e3:.0f} ms, gradient of the input {backward * 1e3:.0f} ms, {ratios[dtype]:.1f} times")
same = ratios[torch.float32] < 4 and ratios[torch.bfloat16] > 8
print("as described" if same else "CHANGED")
sys.exit(not same)
PY

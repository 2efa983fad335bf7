#!/usr/bin/env bash
# torch 2.13.0, FSDP2 (fully_shard), transformers 5.23.0; torch 2.15.0 with transformers 5.24.0 does the same.
#
# One would expect: a model whose residual stream is float32 between blocks that compute in bfloat16 (residual_in_fp32, the
#   default of Mamba, Mamba 2 and Falcon-Mamba) keeps it under fully_shard(block, mp_policy=MixedPrecisionPolicy(
#   param_dtype=torch.bfloat16)), as a plain model in bfloat16 does: the policy is about parameters and what computes with them.
# What happens: each block is a root of its own inputs. cast_forward_inputs, on by default, rounds the stream to bfloat16 where
#   it enters a block, so that the last block's result, rounded, is bit for bit that of the model with residual_in_fp32=False.
#   The field has no effect and nothing is said; after 24 tiny blocks the error is 8 to 16 per cent larger than a plain model's.
#   With cast_forward_inputs=False on the blocks the result is the plain model's, bit for bit.
# Who is hit: whoever trains a Mamba by FSDP2 block by block with the default policy, as trainers and recipes do.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy 2>/dev/null
cat > "$folder/program.py" <<'PY'
import copy
import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29581", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
ids = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 24, "state_size": 16}
KINDS = {
    "Mamba": (transformers.MambaConfig, {}),
    "Mamba 2": (transformers.Mamba2Config, {"num_heads": 8, "head_dim": 16, "n_groups": 1}),
    "Falcon-Mamba": (transformers.FalconMambaConfig, {}),
}


def last_hidden(model):
    """What the last block returns."""
    seen = []
    hook = model.backbone.layers[-1].register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        model(ids, use_cache=False)
    hook.remove()
    return (seen[0][0] if isinstance(seen[0], tuple) else seen[0]).float()


def sharded(model, casts):
    model = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=casts)
    for block in model.backbone.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def far(one, other):
    return ((one - other).pow(2).mean().sqrt() / other.pow(2).mean().sqrt()).item()


print("torch", torch.__version__, "transformers", transformers.__version__)
holds = True
for name, (kind, options) in KINDS.items():
    config = kind(**SIZES, **options)
    assert config.residual_in_fp32
    torch.manual_seed(0)
    exact = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    without = copy.deepcopy(exact)
    for block in without.backbone.layers:
        block.residual_in_fp32 = False
    plain, reference = last_hidden(copy.deepcopy(exact).to(torch.bfloat16)), last_hidden(exact)
    by_default, uncast = (last_hidden(sharded(exact, casts)) for casts in (True, False))
    in_bfloat16 = last_hidden(sharded(without, True))
    errors = far(plain, reference), far(by_default, reference)
    print(f"{name}: far from float32: a plain bfloat16 model {errors[0]:.5f}, fully_shard {errors[1]:.5f}")
    print(f"    fully_shard is the plain model, bit for bit: {torch.equal(by_default, plain)}")
    print(f"    with cast_forward_inputs=False it is: {torch.equal(uncast, plain)}")
    rounded = torch.equal(by_default.bfloat16(), in_bfloat16.bfloat16())
    print(f"    rounded, it is the model with residual_in_fp32=False: {rounded}")
    holds &= rounded and torch.equal(uncast, plain) and not torch.equal(by_default, plain)
    holds &= errors[1] > 1.05 * errors[0]
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }

"""What only a CUDA device can show; run by ``make test-gpu``."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent

SCRIPT = """
import json, sys
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
import fsdp_sft as fs
from tests.models import full, largest_error, oracle_gradients, ragged_batches, tiny_model

context = fs.init_distributed()
assert context.device.type == "cuda" and "nccl" in context.backend
batches = ragged_batches(2 * context.world_size)
mine = batches[context.rank :: context.world_size]
report = {}
CASES = {
    "plain": {},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "zero2": {"reshard_after_forward": False},
}
for name, options in CASES.items():
    model = tiny_model("qwen2-tied", dtype=torch.float64)
    expected = oracle_gradients(model, batches)[1]
    fs.apply_sac(model, "1/3")
    options |= {"mp_policy": MixedPrecisionPolicy(), "master_dtype": torch.float64}
    fs.shard_model(model, mesh=fs.build_mesh(), **options)
    targets = fs.count_targets(mine)
    for i, batch in enumerate(mine):
        with fs.gradient_sync(model, "all" if i == len(mine) - 1 else "none"):
            batch = {k: v.cuda() for k, v in batch.items()}
            fs.causal_lm_loss(model, batch, num_targets=targets).backward()
    report[name] = largest_error({k: full(p.grad).cpu() for k, p in model.named_parameters()}, expected)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.zero_grad()
    result = fs.train_step(model, mine, optimizer)
    fs.evaluate(model, mine)
    fs.save_checkpoint(f"{sys.argv[1]}/{name}", 1, model=model, optimizer=optimizer)
    expected_next = fs.train_step(model, mine, optimizer)
    fs.load_checkpoint(f"{sys.argv[1]}/{name}", model=model, optimizer=optimizer)
    assert fs.train_step(model, mine, optimizer) == expected_next
if context.is_main:
    print(json.dumps(report))
"""


def _torchrun(*arguments: str) -> str:
    ranks = min(torch.cuda.device_count(), 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_gradients_equal_the_single_process_and_checkpoints_resume(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    report = json.loads(_torchrun(str(script), str(tmp_path)).splitlines()[-1])
    assert report.keys() == {"plain", "offload", "zero2"}
    assert all(error <= 1e-10 for error in report.values()), report


def test_the_example_runs_unchanged_with_nccl(tmp_path: Path) -> None:
    text = _torchrun(
        str(ROOT / "examples" / "minimal_sft.py"), "--output", str(tmp_path / "out"), "--compile"
    )
    assert "nccl" in text
    assert int(re.findall(r"after training: (\d+)%", text)[0]) >= 90

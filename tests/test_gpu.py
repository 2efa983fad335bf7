"""What only a CUDA device can show; run by ``make test-gpu``."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft.attention.varlen import attention
from tests.harness import launches
from tests.harness.losses import with_loss
from tests.harness.models import tiny_model
from tests.harness.packs import drawn_rows
from tests.harness.places import EXAMPLES

pytestmark = pytest.mark.gpu


SCRIPT = """
import json, sys
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
import fsdp_sft as fs
from tests.harness.models import FLOAT32, full, largest_error, oracle_gradients, ragged_batches, tiny_model

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
    options |= {"mp_policy": FLOAT32, "master_dtype": torch.float64}
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
    return launches.run([*launches.torchrun(min(torch.cuda.device_count(), 2), "--standalone"), *arguments])


def test_gradients_equal_the_single_process_and_checkpoints_resume(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (line,) = re.findall(r"^{.*}$", _torchrun(str(script), str(tmp_path)), re.MULTILINE)
    report = json.loads(line)
    assert report.keys() == {"plain", "offload", "zero2"}
    assert all(error <= 1e-10 for error in report.values()), report


def test_the_example_runs_unchanged_with_nccl(tmp_path: Path) -> None:
    text = _torchrun(str(EXAMPLES / "minimal_sft.py"), "--output", str(tmp_path / "out"), "--compile")
    assert "nccl" in text
    assert int(re.findall(r"after training: (\d+)%", text)[0]) >= 90


def _gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = fs.causal_lm_loss(with_loss(model, impl="logits"), batch, num_targets=fs.count_targets([batch]))
    loss.backward()
    return float(loss.detach()), torch.cat(
        [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_varlen_attention_trains_packs_as_sdpa_does(
    family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: list[tuple[int, int]] = []
    kernel = attention.varlen_attn

    def counted(*args: Any, **kwargs: Any) -> Any:
        windows.append(kwargs["window_size"])
        return kernel(*args, **kwargs)

    # Most rows are longer than a window of 8, which two of Gemma's layers have here.
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = tiny_model(family, **({"layer_types": kinds} if family == "gemma3" else {})).cuda()
    pack = fs.PackedCollator(max_length=256, pad_to_multiple_of=256)(drawn_rows(12))
    batch = {name: column.cuda() for name, column in pack.items()}
    exact_loss, exact = _gradients(model, batch)
    model.bfloat16()
    plain_loss, plain = _gradients(model, batch)
    fs.use_varlen_attention(model)
    if compiled:
        torch._dynamo.reset()
        fs.compile_blocks(model)
    else:  # in compiled code the growing list would be a reason to compile again
        monkeypatch.setattr(attention, "varlen_attn", counted)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss, grads = _gradients(model, batch)
    assert "torch_attn::_varlen_attn" in {event.name for event in profile.events()}
    if not compiled:
        assert windows == ([(7, 0), (-1, 0), (7, 0)] if family == "gemma3" else [(-1, 0)] * 3)

    def error(found: torch.Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    # With rows that see each other the error is about 1.
    assert loss == pytest.approx(exact_loss, abs=max(5e-3, 3 * abs(plain_loss - exact_loss)))
    assert error(grads) <= max(0.02, 2 * error(plain))
    assert error(plain) < 0.1

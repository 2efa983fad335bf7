"""A user's script under mypy: planted mistakes are found, and right code is left alone."""

from pathlib import Path

import pytest
from mypy import api

from fsdp_sft.planner.run import Run, RunKeywords
from tests.harness.places import EXAMPLES

WRONG = """
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import fsdp_sft as fs

job = {"a": 1}
fs.plan_run("m", num_gpus=8, seq_length=4096, global_batch_size=64, gpuu="h100")  # wrong
fs.plan_run("m", num_gpus="8", seq_length=4096, global_batch_size=64)  # wrong
fs.plan_run("m", num_gpus=8, seq_length=4096, global_batch_size=64, optimizer="adam")  # wrong
fs.longest_rows("m", num_gpus=8, gpu=4)  # wrong
fs.Run(num_gpus=8, micro_batch_size=1, seq_len=4096)  # wrong
model = fs.shard_model(LlamaForCausalLM(LlamaConfig()), mesh=fs.build_mesh())
config: int = model.config  # wrong
optimizer = torch.optim.SGD(model.parameters())
result = fs.train_step(model, [job], optimizer)
result.losss  # wrong
fs.train_step(model, [job], optimizer, grad_sync="never")  # wrong
fs.evaluate(model, [job], mesh=None)  # wrong
fs.save_checkpoint("a", "3", model=model)  # wrong
fs.load_checkpoint("a", model=model).steps  # wrong
fs.SFTCollator(AutoTokenizer.from_pretrained("x"), max_len=3)  # wrong
fs.apply_sac(model, "1/3", placement="odd")  # wrong
fs.export_hf(model)  # wrong
"""


def test_keywords_of_plans_are_the_fields_of_a_run() -> None:
    fields = {
        name: kind for name, kind in Run.__annotations__.items() if name not in ("num_gpus", "seq_length")
    }
    assert RunKeywords.__annotations__ == fields


@pytest.mark.slow
def test_mistakes_of_a_script_are_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WRONG)
    text, _, _ = api.run([str(script), "--no-incremental", "--config-file", ""])
    found = {int(line.split(":")[1]) for line in text.splitlines() if ": error:" in line}
    planted = {n for n, line in enumerate(WRONG.splitlines(), start=1) if line.endswith("# wrong")}
    assert found == planted, text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop_fsdp.py", "long_context.py", "minimal_sft.py"])
def test_right_scripts_are_left_alone(name: str) -> None:
    text, _, _ = api.run(
        [str(EXAMPLES / name), "--no-incremental", "--config-file", "", "--ignore-missing-imports"]
    )
    assert [line for line in text.splitlines() if ": error:" in line and "fsdp_sft" in line] == [], text

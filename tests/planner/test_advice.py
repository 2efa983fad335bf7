"""What the command says where a plan does not fit, or a config is not what was meant: numbers agree."""

import re

import pytest

import fsdp_sft as fs
from fsdp_sft.commands import main
from tests.harness.places import EXAMPLES

QWEN = EXAMPLES / "data" / "qwen2.5-7b"


def _printed(capsys: pytest.CaptureFixture[str], *given: str, code: int = 0) -> str:
    assert main(["plan", *given]) == code
    found = capsys.readouterr()
    return found.out + found.err


def test_fewest_gpus_are_those_for_which_there_is_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The search may fuse AdamW, and so do the advice and the fewest that it names."""
    job = ["--model", str(QWEN), "--seq", "1024", "--global-batch", "64", "--gpu", "h100-40gib"]
    text = _printed(capsys, *job, "--gpus", "1", code=1)
    enough = re.search(r"(\d+) such GPUs", text)
    assert enough is not None
    assert "adamw_fused" in text
    assert _printed(capsys, *job, "--gpus", enough[1])
    _printed(capsys, *job, "--gpus", str(int(enough[1]) // 2), code=1)


def test_the_code_of_a_plan_imports_what_it_needs() -> None:
    job = {"num_gpus": 8, "gpu": "h100", "seq_length": 1024, "global_batch_size": 8}
    lora = fs.plan_run(QWEN, lora_rank=8, **job)[0].code()
    rounded = fs.plan_run(QWEN, optimizer="adamw8bit", **job)[0].code()
    assert lora.startswith("import peft\nfs.init_distributed()\nmesh = fs.build_mesh()\n")
    assert rounded.startswith("import torchao.optim\nfs.init_distributed()\n")
    assert "sampler=fs.ResumableSampler(rows)" in lora

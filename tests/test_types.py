"""A user's script under mypy and pyright: planted mistakes are found, and right code is left alone."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

from tests.harness.places import EXAMPLES

WRONG = """
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import fsdp_sft as fs

job = {"a": 1}
fs.plan_run("m", num_gpus="8", seq_length=4096, global_batch_size=64)  # wrong
fs.Run(num_gpus=8, micro_batch_size=1, seq_length=4096, optimizer="adam")  # wrong
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


RIGHT = ("loop_plain.py", "loop_fsdp.py", "long_context.py", "minimal_sft.py")
Said = dict[int, str]  # by line


def _mypy(folder: Path) -> str:
    return api.run([str(folder), "--no-incremental", "--config-file", "", "--ignore-missing-imports"])[0]


def _pyright(folder: Path) -> str:
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    return subprocess.run(
        [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--project", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout


def _errors(text: str) -> dict[str, Said]:
    """What a checker says, by script and line."""
    found: dict[str, Said] = {}
    for line in text.splitlines():
        if head := re.search(r"(\w+)\.py:(\d+):(?:\d+ -)? error", line):
            found.setdefault(head[1], {})[int(head[2])] = line
    return found


@pytest.fixture(scope="module", params=[_mypy, _pyright])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """What a checker says of the script with mistakes, and of examples; both take a minute."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "wrong.py").write_text(WRONG)
    for name in RIGHT:
        shutil.copy(EXAMPLES / name, folder)
    return _errors(request.param(folder))


@pytest.mark.slow
def test_mistakes_of_a_script_are_found(said: dict[str, Said]) -> None:
    planted = {n for n, line in enumerate(WRONG.splitlines(), start=1) if line.endswith("# wrong")}
    assert said["wrong"].keys() == planted, said["wrong"]


@pytest.mark.slow
def test_right_scripts_are_left_alone(said: dict[str, Said]) -> None:
    """But for what torch says of lists as data sets, and of attributes that a module may have."""
    for name in RIGHT:
        lines = ["", *(EXAMPLES / name).read_text().splitlines()]
        found = said.get(name.removesuffix(".py"), {})
        ours = {n for n, line in enumerate(lines) if "fs." in line and "DataLoader(" not in line}
        assert {n: text for n, text in found.items() if n in ours} == {}

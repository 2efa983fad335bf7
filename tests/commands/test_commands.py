"""The console script: what it prints, what it returns, and that its help can be followed."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import fsdp_sft as fs
from fsdp_sft.commands import main
from tests.harness.chat_templates import CHATML, byte_tokenizer
from tests.harness.chats import TOKENIZERS, chat


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    ).save_pretrained(folder)
    TOKENIZERS["chatml"].save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    made = [chat("question", answer) for answer in ("yes", "a longer answer of many words", "")]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, [*made, chat("nobody answers")])) + "\n\n")
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command: its code, and what it printed, or else its complaint."""

    def called(*words: object) -> tuple[int, str]:
        code = main([*map(str, words)])
        said = capsys.readouterr()
        return code, said.err if code == 2 else said.out

    return called


def test_a_plan_as_json_can_be_read_and_pasted(model: Path, run: Any) -> None:
    job = "--gpus 8 --gpu l4 --seq 512 --global-batch 32 --json"
    code, text = run("plan", "--model", model, *job.split())
    assert code == 0
    found = json.loads(text)
    assert found["plans"][0]["micro_batch_size"] * found["plans"][0]["grad_accum_steps"] == 4
    assert found["usable_bytes"] == found["memory_bytes"] - sum(found["taken_bytes"].values())
    compile(found["code"].replace(", ...)", ")"), "plan", "exec")
    assert f"fs.load_pretrained('{model}'" in found["code"]


def test_a_plan_that_does_not_fit_says_so_as_json(model: Path, run: Any) -> None:
    job = "--gpus 1 --gpu tiny=1.1,100,500 --seq 65536 --global-batch 1 --json"
    code, text = run("plan", "--model", model, *job.split())
    found = json.loads(text)
    assert (code, found["plans"]) == (1, [])
    assert "What would fit" in found["error"]


def test_every_argument_of_advice_is_one_of_the_command_line(model: Path, run: Any) -> None:
    job = "--gpus 1 --gpu tiny=26,100,500 --global-batch 1 --seq 65536 --loss logits"
    given = ["plan", "--model", model, *job.split()]
    code, text = run(*given)
    ways = re.findall(r"(--[^;()]+)[;)]", text.splitlines()[-1])
    assert (code, len(ways) >= 2) == (1, True)
    for way in ways:
        assert run(*given, *shlex.split(way))[0] == 0, text


def test_data(model: Path, rows: Path, tmp_path: Path, run: Any) -> None:
    page = tmp_path / "rows.html"
    given = ["inspect-data", rows, "--tokenizer", model, "--max-length", "96"]
    code, text = run(*given, "--html", page)
    assert code == 0
    for part in ("4 rows", "1 no_target: no message is to be trained", "packs of 96 tokens", "⟦yes"):
        assert part in text
    assert page.read_text().startswith("<!")
    code, text = run(*given, "--json")
    found = json.loads(text)
    assert (code, found["rows"]) == (0, 4)
    assert sum(number for reason, number in found["counts"].items() if reason != "answer_cut_off") == 4
    assert 0 < found["trained_tokens"] < found["tokens"]
    assert found["packs"] >= 1
    assert 0 < found["pack_fill"] <= 1


def test_data_for_a_base_model(model: Path, rows: Path, tmp_path: Path, run: Any) -> None:
    bare = byte_tokenizer("chatml")
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "base")
    given = ["inspect-data", rows, "--tokenizer", tmp_path / "base"]
    code, text = run(*given)
    assert code == 2
    assert "has no chat template" in text
    template = tmp_path / "chatml.jinja"
    template.write_text(CHATML)
    whole = run("inspect-data", rows, "--tokenizer", model)
    assert run(*given, "--chat-template", template) == whole == (0, whole[1])
    assert run(*given, "--chat-template", tmp_path / "none.jinja")[0] == 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("rows.jsonl", "", "no row has a target"),
        ("rows.jsonl", '{"messages": []}\n{"mess', r"line 2: .*a .jsonl file has one row a line"),
        ("rows.jsonl", '{"messages": []}', "no row has a target"),
        ("rows.jsonl", "17", "no row has a target"),
        ("rows.json", "5", "rows.json must hold a list of rows, got"),
        ("rows.json", '{"messages": []}', "rows.json must hold a list of rows, got"),
    ],
)
def test_data_that_cannot_be_used(
    model: Path, tmp_path: Path, name: str, text: str, said: str, run: Any
) -> None:
    (tmp_path / name).write_text(text)
    code, found = run("inspect-data", tmp_path / name, "--tokenizer", model)
    assert (code, bool(re.search(said, found))) == (2, True), found


def test_bad_input(model: Path, rows: Path, tmp_path: Path, run: Any) -> None:
    assert run("inspect-data", tmp_path / "none.jsonl", "--tokenizer", model)[0] == 2
    code, found = run("inspect-data", rows, "--tokenizer", model, "--max-length", "0")
    assert (code, "max_length" in found) == (2, True), found


def test_help_and_version_load_nothing_heavy() -> None:
    check = (
        "import sys\nfrom fsdp_sft.commands import main\n"
        "for words in (['--help'], ['plan', '--help'], ['inspect-data', '--help'], ['--version']):\n"
        "    try:\n        main(words)\n    except SystemExit as end:\n        assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"fsdp-sft {fs.__version__}" in done.stdout


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m fsdp_sft plan --help | head -n 1 > /dev/null; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Error" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--gpus", "8", "--global-batch", "3"], "--global-batch 3 is no multiple"),
        (["--gpus", "0", "--global-batch", "8"], "--gpus must be an integer of at least 1"),
        (["--gpus", "8", "--global-batch", "8", "--optimizer", "lion"], "optimizer must be one of 'adamw'"),
    ],
)
def test_what_cannot_be_planned_is_said(more: list[str], says: str, model: Path, run: Any) -> None:
    code, found = run("plan", "--model", model, "--gpu", "l4", "--seq", "512", *more)
    assert (code, says in found) == (2, True), found


def test_a_model_that_is_nowhere(rows: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    job = "--gpus 8 --gpu l4 --seq 512 --global-batch 8"
    for words in (
        ["plan", "--model", "no/such", *job.split()],
        ["inspect-data", rows, "--tokenizer", "no/such"],
    ):
        code, found = run(*words)
        assert (code, "there is no folder 'no/such'" in found) == (2, True), found


def test_it_is_installed() -> None:
    script = Path(sys.executable).parent / "fsdp-sft"
    if not script.exists():
        pytest.skip("the package is on the path and not installed")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "inspect-data" in done.stdout) == (0, True), done.stderr

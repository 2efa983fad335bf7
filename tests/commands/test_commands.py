"""The console script: what it prints, what it returns, and that its help can be followed."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

import fsdp_sft as fs
from fsdp_sft.commands import main
from tests.harness.chat_templates import CHATML, byte_tokenizer
from tests.harness.chats import TOKENIZERS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config.save_pretrained(folder)
    TOKENIZERS["chatml"].save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    answers = ["yes", "a longer answer of many words", ""]
    made = [
        {"messages": [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    made.append({"messages": [{"role": "user", "content": "nobody answers"}]})
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, made)) + "\n\n")
    return path


def test_a_plan_as_json_can_be_read_and_pasted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--gpus", "8", "--gpu", "l4", "--seq", "512", "--global-batch", "32"]
    assert main(["plan", "--model", str(model), *job, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plans"][0]["micro_batch_size"] * found["plans"][0]["grad_accum_steps"] == 4
    assert found["usable_bytes"] == found["memory_bytes"] - sum(found["taken_bytes"].values())
    compile(found["code"].replace(", ...)", ")"), "plan", "exec")
    assert f"fs.load_pretrained('{model}'" in found["code"]


def test_a_plan_that_does_not_fit_says_so_as_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--gpus", "1", "--gpu", "tiny=1.1,100,500", "--seq", "65536", "--global-batch", "1"]
    assert main(["plan", "--model", str(model), *job, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["plans"] == []
    assert "What would fit" in found["error"]


def test_every_argument_of_advice_is_one_of_the_command_line(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["--model", str(model), "--gpus", "1", "--gpu", "tiny=17,100,500", "--global-batch", "1"]
    assert main(["plan", *job, "--seq", "65536", "--loss", "logits"]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    ways = re.findall(r"(--[^;()]+)[;)]", line)
    assert len(ways) >= 2
    for way in ways:
        given = ["plan", *job, "--seq", "65536", "--loss", "logits", *shlex.split(way)]
        assert main(given) == 0, line
        capsys.readouterr()


def test_data(model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "rows.html"
    given = ["inspect-data", str(rows), "--tokenizer", str(model), "--max-length", "96"]
    assert main([*given, "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "4 rows" in text
    assert "1 no_target: no message is to be trained" in text
    assert "packs of 96 tokens" in text
    assert "⟦yes" in text
    assert page.read_text().startswith("<!")
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 4
    assert sum(number for reason, number in found["counts"].items() if reason != "answer_cut_off") == 4
    assert 0 < found["trained_tokens"] < found["tokens"]
    assert found["packs"] >= 1
    assert 0 < found["pack_fill"] <= 1


def test_data_for_a_base_model(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").mkdir()
    bare = byte_tokenizer("chatml")
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "base")
    given = ["inspect-data", str(rows), "--tokenizer", str(tmp_path / "base")]
    assert main(given) == 2
    assert "has no chat template" in capsys.readouterr().err
    template = tmp_path / "chatml.jinja"
    template.write_text(CHATML)
    assert main([*given, "--chat-template", str(template)]) == 0
    text = capsys.readouterr().out
    assert main(["inspect-data", str(rows), "--tokenizer", str(model)]) == 0
    assert text == capsys.readouterr().out
    assert main([*given, "--chat-template", str(tmp_path / "none.jinja")]) == 2


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
    model: Path, tmp_path: Path, name: str, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert main(["inspect-data", str(path), "--tokenizer", str(model)]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_bad_input(model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect-data", str(tmp_path / "none.jsonl"), "--tokenizer", str(model)]) == 2
    assert main(["inspect-data", str(rows), "--tokenizer", str(model), "--max-length", "0"]) == 2
    assert "max_length" in capsys.readouterr().err


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
def test_what_cannot_be_planned_is_said(
    more: list[str], says: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(model), "--gpu", "l4", "--seq", "512", *more]) == 2
    assert says in capsys.readouterr().err


def test_a_model_that_is_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": []}')
    job = ["--gpus", "8", "--gpu", "l4", "--seq", "512", "--global-batch", "8"]
    for words in (
        ["plan", "--model", "no/such", *job],
        ["inspect-data", str(rows), "--tokenizer", "no/such"],
    ):
        assert main(words) == 2
        assert "there is no folder 'no/such'" in capsys.readouterr().err


def test_it_is_installed() -> None:
    script = Path(sys.executable).parent / "fsdp-sft"
    if not script.exists():
        pytest.skip("the package is on the path and not installed")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "inspect-data" in done.stdout

"""``fsdp-sft plan --write``: a program that trains as it is, is killed, goes on and exports."""

import json
import runpy
import signal
import socket
import time
from pathlib import Path

import pytest
import transformers

import fsdp_sft as fs
from fsdp_sft.commands import main
from tests.harness.chats import chat
from tests.harness.forks import Program
from tests.harness.launches import environment
from tests.harness.places import EXAMPLES, script

CHATS = (EXAMPLES / "data" / "chats.jsonl").read_text(encoding="utf-8").splitlines()
JOB = ["plan", "--gpus", "2", "--gpu", "h100", "--seq", "96", "--global-batch", "8"]
KINDS = {
    "dense": ("dense", []),
    "lora": ("dense", ["--lora", "4"]),
    "moe": ("moe", []),
    "nf4": ("dense", ["--lora", "4", "--frozen-dtype", "nf4"]),
}


def _model(folder: Path, kind: str) -> Path:
    """A folder with a tiny model and a tokenizer that knows the chats."""
    texts = [message["content"] for line in CHATS for message in json.loads(line)["messages"]]
    script("tiny_model").make_tiny_model(folder, texts)
    if kind == "moe":
        known = transformers.AutoConfig.from_pretrained(folder)
        names = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
        config = transformers.MixtralConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            **{name: getattr(known, name) for name in names},
        )
        transformers.MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def _ranks(program: Path, words: str) -> list[Program]:
    """Its two ranks, under way; a launcher would import torch once more for each of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = (environment(RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(2))
    return [Program(program, *words.split(), environment=place) for place in places]


@pytest.mark.parametrize(
    "kind",
    ["dense", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "dense")],
)
@pytest.mark.timeout(900)
def test_the_program_trains_is_killed_goes_on_and_exports(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, options = KINDS[kind]
    if "--lora" in options:
        pytest.importorskip("peft")
    program, data, output = tmp_path / "train.py", tmp_path / "chats.jsonl", tmp_path / "run"
    made = str(_model(tmp_path / "model", base))
    assert main([*JOB, "--model", made, "--no-compile", *options, "--write", str(program)]) == 0
    data.write_text(
        "\n".join([*CHATS[:200], "", json.dumps(chat("a\u2028b", "c"), ensure_ascii=False)]), encoding="utf-8"
    )
    words = f"--data {data} --output {output} --steps 12 --save-every 3 --lr 5e-3 --resume auto"
    killed = _ranks(program, words)
    deadline = time.monotonic() + 500
    while not fs.find_checkpoints(output / "checkpoints"):
        assert all(rank.is_running for rank in killed), "it has ended without a checkpoint"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for rank in killed:
        rank.signal(signal.SIGKILL)
    assert [rank.wait(10)[0] for rank in killed] == [-signal.SIGKILL] * 2
    for code, text in [rank.wait() for rank in _ranks(program, words)]:
        assert code == 0, text[-3000:]
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in log if "loss" in line}
    assert sorted(losses) == list(range(1, 13))
    assert losses[12] < losses[1]
    assert log[-1]["eval_loss"] > 0
    assert (output / "export" / "config.json").exists()
    assert sum("loss" in line for line in log) < 24, "the second run went on where the first was"
    monkeypatch.setattr("sys.argv", [str(program), *words.split()])
    with pytest.raises(SystemExit, match=r"^0$"):  # a scheduler would start what has failed again
        runpy.run_path(str(program), run_name="__main__")


def test_a_plan_that_it_does_not_write_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    program = tmp_path / "train.py"
    job = [*JOB, "--model", str(tmp_path), "--no-padding", "--write", str(program)]
    assert (main(job), program.exists()) == (2, False)
    assert "padded rows" in capsys.readouterr().err

"""The example as a person runs it: learning that can be checked, and a run that is killed and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.harness.forks import Program
from tests.harness.places import EXAMPLES, script
from tests.harness.ranks import run_distributed

BUNDLED = "chats.jsonl"
EXAMPLE = EXAMPLES / "minimal_sft.py"


def _command(output: Path, *arguments: str, ranks: int = 2) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, str(EXAMPLE), "--output", str(output), *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _run(output: Path, *arguments: str, ranks: int = 2) -> str:
    done = subprocess.run(
        _command(output, *arguments, ranks=ranks),
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _losses(output: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; a step that ran again after a resumption counts as it ran last."""
    rows = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}


SLOW = "computing in float32: bfloat16 takes several times as long on a CPU without instructions for it\n"


@pytest.mark.parametrize(
    ("choice", "device", "capabilities", "dtype", "said"),
    [
        ("auto", "cpu", {"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16, "computing in bfloat16\n"),
        ("auto", "cpu", {"neon": True, "bf16": True}, torch.bfloat16, "computing in bfloat16\n"),
        ("auto", "cpu", {"avx512_vnni": True, "avx512_bf16": False}, torch.float32, SLOW),
        ("auto", "cpu", {"neon": True, "bf16": False}, torch.float32, SLOW),
        ("auto", "cpu", {"architecture": "another"}, torch.float32, SLOW),
        ("auto", "cuda", {"avx512_bf16": False}, torch.bfloat16, "computing in bfloat16\n"),
        ("bfloat16", "cpu", {"avx512_bf16": False}, torch.bfloat16, "computing in bfloat16\n"),
        ("float32", "cpu", {"avx512_bf16": True}, torch.float32, "computing in float32\n"),
        ("float32", "cuda", {}, torch.float32, "computing in float32\n"),
    ],
)
def test_the_precision_is_the_one_asked_for_or_the_fast_one(
    choice: str,
    device: str,
    capabilities: dict[str, bool],
    dtype: torch.dtype,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    context = SimpleNamespace(device=torch.device(device), is_main=True)
    assert script("minimal_sft").compute_dtype(choice, context) == dtype
    assert capsys.readouterr().out == said


def _dtype_where_rank_1_is_slow() -> torch.dtype:
    rank = dist.get_rank()
    torch.cpu.get_capabilities = lambda: {"avx512_bf16": rank == 0}
    context = SimpleNamespace(device=torch.device("cpu"), is_main=rank == 0)
    return script("minimal_sft").compute_dtype("auto", context)


def test_ranks_on_different_cpus_compute_in_the_same_precision() -> None:
    assert run_distributed(_dtype_where_rank_1_is_slow, 2) == [torch.float32, torch.float32]


def test_a_quarter_of_the_demo_learns(tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = ("--output", str(output), "--micro-batch-size", "32", "--steps", "50")
    code, text = Program(EXAMPLE, *arguments, environment=_environment()).wait(240)
    assert code == 0, text[-3000:]
    losses = _losses(output)
    assert list(losses) == list(range(1, 51))
    assert losses[50][0] < losses[1][0] / 3
    assert len(re.findall(r"answered exactly \w+ training: \d+%", text)) == 2
    assert (output / "loss.png").stat().st_size > 5000


# Two ranks are as `make demo` has them; test_launch.py has two in each run of the suite.
@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_demo_learns_to_answer_prompts_it_has_not_seen(tmp_path: Path, ranks: int) -> None:
    folder = EXAMPLES / "data"
    train, test = (
        [json.loads(line)["messages"] for line in (folder / name).read_text().splitlines()]
        for name in ("chats.jsonl", "chats-test.jsonl")
    )
    assert len(test) >= 100
    assert len({messages[1]["content"] for messages in test}) >= 20
    assert not {m[0]["content"] for m in train} & {m[0]["content"] for m in test}
    output = tmp_path / "out"
    if ranks == 1:
        arguments = ("--output", str(output), "--micro-batch-size", "32")
        code, text = Program(EXAMPLE, *arguments, environment=_environment()).wait(600)
        assert code == 0, text[-3000:]
    else:
        text = _run(output)
    before, after = (int(share) for share in re.findall(r"answered exactly \w+ training: (\d+)%", text))
    assert before <= 5
    assert after >= 90
    losses = _losses(output)
    assert list(losses) == list(range(1, 161))
    assert losses[160][0] < losses[1][0] / 10
    assert (output / "loss.png").stat().st_size > 5000


def _kill_at(output: Path, step: int, *arguments: str) -> None:
    """Start a run and kill all of its processes as soon as it has logged ``step``."""
    with (output.parent / "cut.txt").open("w") as text:
        process = subprocess.Popen(
            _command(output, *arguments), env=_environment(), stdout=text, stderr=text, start_new_session=True
        )
    log = output / "log.jsonl"
    deadline = time.monotonic() + 240
    while not log.exists() or log.read_text().count("\n") < step:
        assert process.poll() is None, (output.parent / "cut.txt").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.killpg(process.pid, signal.SIGKILL)
    for child in children:  # torchrun puts each worker into a session of its own
        os.kill(int(child), signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_make_demo_goes_on_bit_for_bit_and_shows_it_on_one_page(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--output", str(output)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=True)
    same, of = re.findall(r"(\d+) of (\d+) steps that were made twice", done.stdout)[0]
    assert int(same) == int(of) >= 10
    page = (output / "report.html").read_text(encoding="utf-8")
    assert (page.count("data:image/png;base64,"), page.count("<iframe"), page.count("$")) == (1, 2, 0)


@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        ("alpaca_en_demo.json", ("--max-length", "384", "--micro-batch-size", "4")),
        ("glaive_toolcall_en_demo.json", ("--max-length", "1024", "--micro-batch-size", "2")),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, data: str, arguments: tuple[str, ...]) -> None:
    folder = os.environ.get("FSDP_SFT_DATA")
    if data != BUNDLED and not folder:
        pytest.skip("FSDP_SFT_DATA is not set to a folder with the sample data")
    path = EXAMPLES / "data" / data if data == BUNDLED else Path(str(folder)) / data
    arguments = ("--data", str(path.resolve()), "--steps", "60", "--save-every", "10", *arguments)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _run(whole, *arguments)
    _kill_at(cut, 33, *arguments)
    assert not (cut / "export").exists()
    _run(cut, *arguments, "--resume")
    expected, actual = _losses(whole), _losses(cut)
    first, last = (sum(expected[s][0] for s in range(start, start + 5)) / 5 for start in (1, 56))
    print(f"{data}: mean loss of the first 5 steps {first:.4f}, of the last 5 {last:.4f}")
    assert last < 0.8 * first
    assert list(actual) == list(range(1, 61))
    assert actual == expected, "losses and gradient norms, bit for bit"


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    code, text = Program(EXAMPLE, "--output", str(tmp_path), environment=_environment()).wait()
    assert code == 1
    assert "holds an earlier run: give --resume, or another --output" in text


def test_a_signal_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """One process; several ranks are signalled in test_launch.py and test_slurm.py."""
    arguments = ["--steps", "20", "--resume", "auto", "--output", str(tmp_path)]
    arguments += ["--data", str(EXAMPLES / "data" / BUNDLED), "--micro-batch-size", "4"]
    log = tmp_path / "log.jsonl"
    program = Program(EXAMPLE, *arguments, environment=_environment())
    while program.is_running and not (log.exists() and log.read_text().count("\n") >= 7):
        time.sleep(0.01)
    program.signal(signal.SIGUSR1)
    code, text = program.wait(60)
    assert code == 85, text[-3000:]
    saved = re.search(r"SIGUSR1: step (\d+) is saved", text)
    assert saved is not None
    assert 7 <= int(saved[1]) < 20
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == [f"step-{saved[1]}"]
    for said in ("exported to", "nothing to do"):
        code, text = Program(EXAMPLE, *arguments, environment=_environment()).wait()
        assert (code, said in text) == (0, True), text[-3000:]
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines() if '"loss"' in line]
    assert steps == list(range(1, 21)), "each step once: no step is lost and none runs again"

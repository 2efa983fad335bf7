"""The example as a person runs it: learning that can be checked, and a run that is killed and resumed."""

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

from tests.harness import launches
from tests.harness.forks import Program
from tests.harness.places import EXAMPLES, script
from tests.harness.ranks import run_distributed

BUNDLED = "chats.jsonl"
EXAMPLE = EXAMPLES / "minimal_sft.py"


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
    code, text = Program(EXAMPLE, *arguments, environment=launches.environment()).wait(240)
    assert code == 0, text[-3000:]
    steps, losses, _ = zip(*launches.losses(output), strict=True)
    assert steps == tuple(range(1, 51))
    assert losses[-1] < losses[0] / 3
    assert len(re.findall(r"answered exactly \w+ training: \d+%", text)) == 2
    assert (output / "loss.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_make_demo_goes_on_bit_for_bit_and_shows_it_on_one_page(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--output", str(output)]
    done = subprocess.run(command, env=launches.environment(), capture_output=True, text=True, check=True)
    same, of = re.findall(r"(\d+) of (\d+) steps that were made twice", done.stdout)[0]
    assert int(same) == int(of) >= 10
    page = (output / "report.html").read_text(encoding="utf-8")
    assert (page.count("data:image/png;base64,"), page.count("<iframe"), page.count("$")) == (1, 2, 0)


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    code, text = Program(EXAMPLE, "--output", str(tmp_path), environment=launches.environment()).wait()
    assert code == 1
    assert "holds an earlier run: give --resume, or another --output" in text


def test_a_signal_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """One process; several ranks are signalled in test_launch.py and test_slurm.py."""
    arguments = ["--steps", "20", "--resume", "auto", "--output", str(tmp_path)]
    arguments += ["--data", str(EXAMPLES / "data" / BUNDLED), "--micro-batch-size", "4"]
    log = tmp_path / "log.jsonl"
    program = Program(EXAMPLE, *arguments, environment=launches.environment())
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
        code, text = Program(EXAMPLE, *arguments, environment=launches.environment()).wait()
        assert (code, said in text) == (0, True), text[-3000:]
    assert [step for step, *_ in launches.losses(tmp_path)] == list(range(1, 21)), (
        "each step once: no step is lost and none runs again"
    )

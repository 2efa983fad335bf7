"""The example as a person runs it: learning that can be checked, and a run that is killed and resumed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.harness import launches
from tests.harness.forks import Program
from tests.harness.places import EXAMPLES, script
from tests.harness.ranks import on_ranks

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
    assert (
        script("minimal_sft").compute_dtype(
            choice, SimpleNamespace(device=torch.device(device), is_main=True)
        )
        == dtype
    )
    assert capsys.readouterr().out == said


@on_ranks(2)
def test_ranks_on_different_cpus_compute_in_the_same_precision() -> None:
    rank = dist.get_rank()
    torch.cpu.get_capabilities = lambda: {"avx512_bf16": rank == 0}
    assert (
        script("minimal_sft").compute_dtype(
            "auto", SimpleNamespace(device=torch.device("cpu"), is_main=rank == 0)
        )
        == torch.float32
    )


def test_a_quarter_of_the_demo_learns(tmp_path: Path) -> None:
    output = tmp_path / "out"
    code, text = Program(
        EXAMPLE,
        *("--output", str(output), "--micro-batch-size", "32", "--steps", "50"),
        environment=launches.environment(),
    ).wait(240)
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
    text = launches.run([sys.executable, str(EXAMPLES / "demo.py"), "--output", str(output)])
    same, of = re.findall(r"(\d+) of (\d+) steps that were made twice", text)[0]
    assert int(same) == int(of) >= 10
    page = (output / "report.html").read_text(encoding="utf-8")
    assert (page.count("data:image/png;base64,"), page.count("<iframe"), page.count("$")) == (1, 2, 0)


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    code, text = Program(EXAMPLE, "--output", str(tmp_path), environment=launches.environment()).wait()
    assert (code, "holds an earlier run: give --resume, or another --output" in text) == (1, True), text


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
    steps, losses, _ = zip(*launches.losses(tmp_path), strict=True)
    assert steps == tuple(range(1, 21)), "each step once: no step is lost and none runs again"
    assert losses[-1] < losses[0]
    assert (tmp_path / "loss.png").stat().st_size > 5000


# --- the notebook, cell by cell, as a program: what it writes is trained, exported and asked ----------------

NOTEBOOK = EXAMPLES / "first_run.ipynb"


def _as_python(source: str) -> str:
    """A cell without IPython: files written, commands run, packages left as they are."""
    if source.startswith("%%writefile "):
        first, _, rest = source.partition("\n")
        return f"Path({first.split()[1]!r}).write_text({rest!r})"
    lines = []
    for line in source.splitlines():
        if line.startswith("!"):
            line = f"subprocess.run(f{line[1:]!r}, shell=True, check=True)"
        lines.append("" if line.startswith("%pip") else line)
    return "\n".join(lines)


@pytest.mark.parametrize("steps", [20, 40])
def test_every_cell_runs_and_the_model_learns(steps: int, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(cell.get("outputs", []) == [] for cell in cells)  # nothing of a run is kept
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = "\n\n".join(["import subprocess", *map(_as_python, sources)])
    assert "STEPS = 160" in program
    bin_folder = str(Path(sys.executable).parent)
    done = subprocess.run(
        [sys.executable, "-c", program.replace("STEPS = 160", f"STEPS = {steps}")],
        cwd=tmp_path / "examples",
        env={
            **os.environ,
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": f"{tmp_path / 'examples'}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "⟦It is called" in done.stdout
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 1 + steps // 20
    assert losses[-1] < losses[0] / (2 if steps == 40 else 1), losses
    assert done.stdout.count("(wanted: It is called ") == 5


# --- the example for long rows: the same training at another cp, kinds of data, refusals ---

LONG = EXAMPLES / "long_context.py"
HELD_OUT = re.compile(r"held-out loss .*: (\S+) seeing the whole row, (\S+) seeing that half alone")
SHORT = ["--steps", "4", "--save-every", "2", "--seq-length", "128", "--dtype", "float32"]


def _alone(output: Path, *arguments: str, code: int = 0) -> str:
    """What one rank prints."""
    ended, text = Program(
        LONG, "--output", str(output), *arguments, environment=launches.environment()
    ).wait()
    assert ended == code, text[-3000:]
    return text


def _losses(output: Path) -> dict[int, float]:
    return {step: loss for step, loss, _ in launches.losses(output)}


def _held_out(text: str) -> torch.Tensor:
    return torch.tensor([(float(whole), float(half)) for whole, half in HELD_OUT.findall(text)])


def _cut_back_to(output: Path, step: int) -> None:
    """Leave what a run had when it was killed after it saved ``step``."""
    shutil.rmtree(output / "export")
    for folder in (output / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (output / "log.jsonl").unlink()


def _data(folder: Path) -> list[str]:
    """Arguments of a short run on a few rows, with a tiny model."""
    texts = [row["text"][:2000] for row in script("long_context").help_topics()[:8]]
    (folder / "topics.txt").write_text("\n\n".join(texts), encoding="utf-8")
    script("tiny_model").make_tiny_model(folder / "model", texts, max_length=128)
    return [*SHORT, "--data", str(folder / "topics.txt"), "--model", str(folder / "model")]


@pytest.mark.slow
def test_two_ranks_share_rows_and_one_goes_on_alone(tmp_path: Path) -> None:
    alone, shared, run = tmp_path / "alone", tmp_path / "shared", _data(tmp_path)
    shared_command = [*launches.torchrun(2, "--standalone"), str(LONG)]
    expected = _alone(alone, *run)
    text = launches.run([*shared_command, "--output", str(shared), *run, "--cp", "2"])
    assert _losses(shared) == pytest.approx(_losses(alone), rel=1e-5)
    assert _held_out(text) == pytest.approx(_held_out(expected), abs=2e-4)
    assert "cp=2" in text
    assert "peak memory of a rank in training:" in text

    whole = _losses(shared)
    _cut_back_to(shared, 2)
    text = _alone(shared, *run, "--resume")
    assert "going on after step 2" in text
    assert _losses(shared) == pytest.approx({step: whole[step] for step in (3, 4)}, rel=1e-5)
    exported, plain = (AutoModelForCausalLM.from_pretrained(output / "export") for output in (shared, alone))
    torch.testing.assert_close(exported.state_dict(), plain.state_dict(), rtol=1e-2, atol=1e-3)


def test_documents_are_cut_and_every_token_is_trained() -> None:
    example, tokenizer = (
        script("long_context"),
        script("tiny_model").make_tokenizer(["The sky is blue. Here we go."]),
    )
    texts = ["The sky is blue. " * 40, "Here we go."]
    rows = example.encode([{"text": text} for text in texts], tokenizer, 32)
    assert all(len(row.input_ids) <= 32 and row.labels == row.input_ids for row in rows)
    joined = [token for row in rows for token in row.input_ids]
    assert joined == [t for text in texts for t in (*tokenizer(text).input_ids, tokenizer.eos_token_id)]
    with pytest.raises(SystemExit, match="row 1 has none"):
        example.encode([{"text": "a"}, {"messages": []}], tokenizer, 32)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cp", "3"], "cp=3 makes 3 ranks, but the job has 1"),
        (["--model", "{model}", "--seq-length", "256"], "more than the 128 positions"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    tmp_path: Path, arguments: list[str], reason: str
) -> None:
    model = tmp_path / "model"
    script("tiny_model").make_tiny_model(model, ["Here we go."], max_length=128)
    assert reason in _alone(tmp_path / "out", *[word.format(model=model) for word in arguments], code=1)

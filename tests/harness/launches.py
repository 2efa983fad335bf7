"""The example under a launcher: its command line, a clean environment, the losses it logs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fsdp_sft as fs
from tests.harness.device import for_launched
from tests.harness.places import EXAMPLES, ROOT

EXAMPLE = EXAMPLES / "minimal_sft.py"
PACED = Path(__file__).with_name("paced_example.py")
# Beginnings of everything that a launcher around the tests may have set.
_LAUNCHERS = (
    *("SLURM_", "SUBMITIT_", "TORCHELASTIC_", "GROUP_", "ROLE_", "OMPI_", "PMI_"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


def environment(**more: str) -> dict[str, str]:
    """This process's environment without any launcher's variables, with the package found from its source."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    devices = for_launched()
    paths = (devices.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT), kept.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, paths))
    return {**kept, **devices, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}


def arguments(
    output: Path, *, ranks: int, steps: int, dtype: str = "float32", save_every: int = 1000
) -> list[str]:
    """The example's arguments, so that any number of ranks sees the same global batches."""
    options: dict[str, object] = {
        "--data": EXAMPLES / "data" / "chats.jsonl",
        "--output": output,
        "--steps": steps,
        "--save-every": save_every,
        "--micro-batch-size": 8 // ranks,
        "--dtype": dtype,
    }
    return [str(word) for pair in options.items() for word in pair]


def torchrun(ranks: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *options]


def run(command: list[str], *, timeout: float = 280, **env: str) -> str:
    """What a command that must succeed prints, errors included."""
    done = subprocess.run(
        command, env=environment(**env), capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def losses(output: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm in the order logged."""
    lines = (output / "log.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def last_step(output: Path) -> int:
    """The newest step in the log; 0 before the first."""
    logged = losses(output) if (output / "log.jsonl").exists() else []
    return logged[-1][0] if logged else 0


def largest_difference(first: Path, second: Path) -> float:
    """Between the losses of two whole runs, step by step."""
    ours, theirs = losses(first), losses(second)
    assert [step for step, *_ in ours] == [step for step, *_ in theirs]
    return max(abs(a - b) for (_, a, _), (_, b, _) in zip(ours, theirs, strict=True))


def sound_steps(output: Path, *, ranks: int) -> list[int]:
    """The steps saved below a run's output, each read through and found whole from all ranks."""
    found = fs.find_checkpoints(output / "checkpoints")
    for info in found:
        assert info.sound, info
        assert fs.verify_checkpoint(info.path) == []
        assert json.loads((info.path / "MANIFEST.json").read_text())["world_size"] == ranks
    return [info.step for info in found]

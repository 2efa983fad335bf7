"""What machines do to a job: a rank that stands still, a clock that jumps, no memory, no shared memory.

Each fault is given to two ranks that train and save, or to a job beside which another one reads. The outcome
is what the ranks raise, and what a new job finds.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import fsdp_sft as fs
from fsdp_sft import dcp_io
from tests.faults.tables import table
from tests.harness.models import tiny_model

STILL_SECONDS = 60
KILLED_SECONDS = 20  # within which the others must be told of a rank that was killed
Result = tuple[str, str, bool]  # fault, outcome, whether it is as it must be


def machines(root: Path, *, still: float = STILL_SECONDS) -> tuple[str, int]:
    """The section on machines."""
    root.mkdir(parents=True, exist_ok=True)
    results = [
        _stands_still(root / "still", still),
        _clock(root / "clock"),
        _killed(root / "killed"),
        _shared_memory(root / "shm"),
        _reader(root / "reader"),
    ]
    bad = sum(not fine for *_, fine in results)
    lines = [[fault, outcome, "yes" if fine else "NO"] for fault, outcome, fine in results]
    text = (
        f"## Machines\n\n**{bad} of {len(results)} not as it must be**: two ranks train and save; afterwards "
        "a new job loads the newest step, bit for bit what was saved.\n\n"
        + table(["fault", "outcome", "as it must be"], lines)
        + "\n"
    )
    return text, bad


def _run(case: str, root: Path, *, prefix: tuple[str, ...] = (), **options: Any) -> tuple[list[Any], float]:
    """What each of two ranks says at the end of a case, None if it was killed; and the seconds."""
    root.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.monotonic()
    ranks = []
    for rank in range(2):
        own = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{name: str(value) for name, value in (own | meeting).items()}}
        command = [sys.executable, "-m", "tests.faults.machines", case, str(root), json.dumps(options)]
        ranks.append(subprocess.Popen([*prefix, *command], env=environment, stderr=subprocess.DEVNULL))
    for rank in ranks:
        try:
            rank.wait(timeout=300)
        except subprocess.TimeoutExpired:
            rank.kill()
    seconds = time.monotonic() - started
    told = [root / f"told-{rank}.json" for rank in range(2)]
    return [json.loads(path.read_text()) if path.exists() else None for path in told], seconds


def _stands_still(root: Path, seconds: float) -> Result:
    told, _ = _run("still", root, seconds=seconds)
    fine = told == ["went on", "went on"] and _is_loaded(root)
    return f"a rank stands still for {seconds:g} s (SIGSTOP), the time-out is longer", f"{told[0]}", fine


def _clock(root: Path) -> Result:
    told, _ = _run("clock", root)
    return (
        "a rank's clock jumps by hours, back and forth",
        f"{told[0]}",
        told == ["went on"] * 2 and _is_loaded(root),
    )


def _killed(root: Path) -> Result:
    told, seconds = _run("killed", root)
    fine = told[0] is not None and told[0] != "went on" and told[1] is None and seconds < KILLED_SECONDS + 20
    return "a rank is killed in a backward, as by the OOM killer", f"{told[0]}", fine and _is_loaded(root)


def _shared_memory(root: Path) -> Result:
    fault = "/dev/shm is full, with a worker of a DataLoader"
    mount = 'mount -t tmpfs -o size=16k tmpfs /dev/shm && head -c 16k /dev/zero > /dev/shm/full; exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", mount, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        return fault, "not run: no right to mount", True
    told, seconds = _run("shm", root, prefix=prefix)
    return fault, f"{told[0]}", None not in told and "went on" not in told and seconds < 120


def _reader(root: Path) -> Result:
    """A job saves and deletes; another process loads from the same root all the time."""
    root.mkdir(parents=True)
    writer = subprocess.Popen([sys.executable, "-m", "tests.faults.machines", "writer", str(root), "{}"])
    loads, wrong = 0, []
    while writer.poll() is None:
        model = torch.nn.Linear(64, 64)
        try:
            step = fs.load_checkpoint(root, model=model).step
        except fs.CheckpointNotFoundError:
            continue  # before the first step
        except Exception as error:
            wrong.append(type(error).__name__)
            continue
        loads += 1
        if model.weight.unique().tolist() != [step]:
            wrong.append(f"step {step} has other values")
    fine = writer.returncode == 0 and not wrong and loads > 10
    return "keep_last=1 deletes steps that another process is loading", f"{loads} loads, wrong: {wrong}", fine


def _is_loaded(root: Path) -> bool:
    """Whether the newest step is sound, and is what its job said that it saved."""
    steps = dcp_io.find_checkpoints(root)
    if not steps or not steps[-1].sound:
        return False
    model = _model()
    step = fs.load_checkpoint(root, model=model).step
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    return json.loads((root / f"sum-{step}.json").read_text()) == total


def _model() -> Any:
    torch.manual_seed(0)
    return tiny_model("llama")


def _train(root: Path, model: Any, optimizer: Any, step: int) -> None:
    ids = torch.arange(3, 19).view(2, 8)
    fs.train_step(model, [{"input_ids": ids, "labels": ids}], optimizer)
    total = sum(float(p.full_tensor().detach().double().sum()) for p in model.parameters())
    if dist.get_rank() == 0:
        (root / f"sum-{step}.json").write_text(json.dumps(total))
    fs.save_checkpoint(root, step, model=model, optimizer=optimizer)


def _case(root: Path, timeout: float, act: Callable[[Any, Any], None]) -> None:
    """Train and save a step, let ``act`` happen, and say how it ended."""
    fs.init_distributed(device_type="cpu", timeout=timedelta(seconds=timeout))
    model = fs.shard_model(_model(), mesh=fs.build_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(root, model, optimizer, 1)
    try:
        act(model, optimizer)
        told = "went on"
    except Exception as error:
        told = f"{type(error).__name__}: {str(error)[:90]}"
    (root / f"told-{dist.get_rank()}.json").write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # a broken group would be waited for


def _still(root: Path, seconds: float) -> None:
    def act(model: Any, optimizer: Any) -> None:
        if dist.get_rank() == 1:
            wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        _train(root, model, optimizer, 2)

    _case(root, 4 * seconds + 60, act)


def _jumping(root: Path) -> None:
    def act(model: Any, optimizer: Any) -> None:
        real, draw = time.time, random.Random(dist.get_rank())
        jumping = lambda: real() + (draw.choice((-86_400, 0, 86_400)) if dist.get_rank() == 1 else 0)  # noqa: E731
        with mock.patch.object(time, "time", jumping):
            for step in range(2, 6):
                _train(root, model, optimizer, step)

    _case(root, 60, act)


def _dying(root: Path) -> None:
    def act(model: Any, optimizer: Any) -> None:
        if dist.get_rank() == 1:
            layer = next(iter(fs.find_blocks(model).values()))
            layer.register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        _train(root, model, optimizer, 2)

    _case(root, KILLED_SECONDS, act)


class _Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 16,), index)


def _without_shared_memory(root: Path) -> None:
    def act(model: Any, optimizer: Any) -> None:
        list(DataLoader(_Rows(), num_workers=1, timeout=30))

    _case(root, 60, act)


def _writer(root: Path) -> None:
    for step in range(1, 60):
        model = torch.nn.Linear(64, 64)
        torch.nn.init.constant_(model.weight, step)
        fs.save_checkpoint(root, step, model=model, keep_last=1)


if __name__ == "__main__":
    case, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    {
        "still": _still,
        "clock": _jumping,
        "killed": _dying,
        "shm": _without_shared_memory,
        "writer": _writer,
    }[case](folder, **options)

"""The example under every launcher that runs on one machine: equal losses for equal global batches."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.utils.distributed import get_free_port

from tests.harness import launches
from tests.harness.forks import Program

STEPS = 8
TOLERANCE = 1e-6
# What salloc and sbatch set for a program that no srun started.
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_NODELIST": "n[1-2]"}


def _example(output: Path, ranks: int, *more: str) -> list[str]:
    return [str(launches.EXAMPLE), *launches.arguments(output, ranks=ranks, steps=STEPS), *more]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain python, one process, inside an allocation that it must not take for a step."""
    output = tmp_path_factory.mktemp("plain")
    script, *arguments = _example(output, 1)
    code, text = Program(Path(script), *arguments, environment=launches.environment(**ALLOCATION)).wait()
    assert code == 0, text[-3000:]
    assert "rank 0 of 1" in text
    return output


def _difference(output: Path, reference: Path) -> float:
    difference = launches.largest_difference(output, reference)
    print(f"{output.name}: largest difference of a loss {difference:.1e} over {STEPS} steps")
    return difference


def _run_together(
    commands: list[tuple[list[str], dict[str, str]]], timeout: float = 280, code: int = 0
) -> list[str]:
    """Start all, and return what each printed; all must end with this code."""
    started = [
        subprocess.Popen(
            command,
            env=launches.environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command, env in commands
    ]
    try:
        texts = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
    assert [process.returncode for process in started] == [code] * len(started), texts
    return texts


def test_torchrun_trains_as_plain_python_does(plain: Path, tmp_path: Path) -> None:
    assert "rank 0 of 2 (local 0 of 2)" in launches.run(
        launches.torchrun(2, "--standalone", *_example(tmp_path, 2))
    )
    assert _difference(tmp_path, plain) <= TOLERANCE


@pytest.mark.slow
def test_two_torchrun_agents(plain: Path, tmp_path: Path) -> None:
    meeting = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{get_free_port()}")
    command = launches.torchrun(2, *meeting, "--rdzv-id=two", *_example(tmp_path, 4))
    assert (
        sum("rank 0 of 4 (local 0 of 2)" in text for text in _run_together([(command, {}), (command, {})]))
        == 1
    )
    assert _difference(tmp_path, plain) <= TOLERANCE


@pytest.mark.slow
def test_a_step_with_one_gpu_visible_per_task(plain: Path, tmp_path: Path) -> None:
    """What srun --gpus-per-task=1 sets on two nodes; the machine need not have the GPUs."""
    step = {
        **ALLOCATION,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "localhost,other",
        "MASTER_PORT": str(get_free_port()),
    }
    tasks = [
        {
            **step,
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % 2),
            "SLURM_NODEID": str(rank // 2),
            "CUDA_VISIBLE_DEVICES": str(rank % 2),
        }
        for rank in range(4)
    ]
    texts = _run_together([([sys.executable, *_example(tmp_path, 4)], task) for task in tasks])
    assert "rank 0 of 4 (local 0 of 2)" in texts[0]
    assert "launcher: slurm (job 7, step 0" in texts[0]
    assert _difference(tmp_path, plain) <= TOLERANCE


@contextlib.contextmanager
def _two_namespaces() -> Iterator[list[list[str]]]:
    """Two network namespaces joined by a cable; the commands that run something inside of each."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    names = [f"sft-{os.getpid()}-{side}" for side in "ab"]
    setup = [
        *(f"netns add {name}" for name in names),
        f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}",
        *(f"-n {name} addr add 10.77.0.{side}/24 dev cable" for side, name in enumerate(names, start=1)),
        *(f"-n {name} link set {link} up" for name in names for link in ("lo", "cable")),
    ]
    try:
        for words in setup:
            done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"no network namespaces here: ip {words}: {done.stderr}")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _on_two_hosts(inside: list[list[str]], *program: str) -> list[list[str]]:
    """torchrun's command for each host, of two ranks each."""
    meeting = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", "--rdzv-id=x")
    return [
        [
            *inside[host],
            *launches.torchrun(
                2, *meeting, f"--rdzv-conf=is_host={1 - host}", f"--local-addr=10.77.0.{host + 1}", *program
            ),
        ]
        for host in (0, 1)
    ]


@pytest.mark.slow
def test_two_hosts_with_hsdp(plain: Path, tmp_path: Path) -> None:
    """Shards inside of each host, replicas across: two ranks in each of two network namespaces."""
    with _two_namespaces() as inside:
        commands = _on_two_hosts(inside, *_example(tmp_path, 4, "--dp-replicate", "2"))
        _run_together(
            [(one, {"GLOO_SOCKET_IFNAME": "cable", "TP_SOCKET_IFNAME": "cable"}) for one in commands]
        )
    assert _difference(tmp_path, plain) <= TOLERANCE

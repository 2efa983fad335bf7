"""A real Slurm of two nodes: equal losses, and whatever ends a job early in mid-training.

Its controller, two node daemons and munge run on this one machine, all on loopback. Everything it writes lies
in one temporary folder, on ports that were free: a Slurm that the machine may have is left alone. Nodes are
called n1 and n2, which resolve to nothing.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.harness import launches
from tests.harness.places import EXAMPLES, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 40
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")  # Debian's and Ubuntu's names
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "munged", "munge")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}

CONFIGURATION = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
JobRequeue=1
MinJobAge=3600
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=4 State=UNKNOWN
PartitionName=p Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class SlurmCluster:
    """A running cluster.

    Attributes:
        env: Environment in which its commands find it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        outside = {k: v for k, v in launches.environment().items() if not k.startswith(("SBATCH_", "SRUN_"))}
        self.env = {**outside, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        folder, host = self.folder, socket.gethostname().split(".")[0]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        text = CONFIGURATION.format(folder=folder, host=host, user=user, ports=_free_ports())
        (folder / "slurm.conf").write_text(text.lstrip())
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        files = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
        # --force: munged else wants its files in folders that only a system user writes to.
        self._daemon("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files.values())
        self.until(lambda: (folder / "munge.socket").exists(), 20, "munged does not start")
        self._daemon("slurmctld", "-D", "-i")
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node)
        self.until(
            lambda: self.call("sinfo", "-h", "-o", "%T %D") == "idle 2", 60, "the two nodes are not idle"
        )

    def stop(self) -> None:
        with contextlib.suppress(Exception):
            self.call("scancel", "--user", str(os.getuid()))
            self.until(lambda: not self.call("squeue", "-h"), 20, "jobs remain")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def call(self, *command: str, **env: str) -> str:
        """What one of Slurm's commands prints; raises if it fails."""
        done = self._run(command, 60, env)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout.strip()

    def _run(
        self, command: Sequence[str], timeout: float, env: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env={**self.env, **env}, capture_output=True, text=True, timeout=timeout, check=False
        )

    def srun(self, *arguments: str, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a step with an allocation of its own to its end."""
        return self._run(["srun", *arguments], timeout, env)

    def job(self, job_id: str) -> dict[str, str]:
        """What the controller says about a job: JobState, ExitCode, Restarts, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", job_id)))

    def release(self, job_id: str) -> None:
        """Start a requeued job soon: by Slurm's design it would wait for about two minutes.

        Not at once: requeueing revokes the job's credential for the rest of that second, in which slurmd
        refuses the next start ("already killed, do not launch") and the job fails with exit code 1.
        """
        with contextlib.suppress(RuntimeError):  # it may have started in between
            job = self.job(job_id)
            waited = datetime.now() - datetime.fromisoformat(job["SubmitTime"])  # requeueing counts as one
            if job["Reason"] in ("BeginTime", "JobHeldUser") and waited > timedelta(seconds=3):
                self.call("scontrol", "update", f"JobId={job_id}", "StartTime=now")

    def until(self, condition: Callable[[], Any], seconds: float, otherwise: str) -> None:
        """Wait for a condition; RuntimeError with the daemons' logs after ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(RuntimeError):
                if condition():
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{otherwise}\n{self.logs()}")
            time.sleep(0.2)

    def ended(self, job_id: str, *, starts: int = 1) -> bool:
        """Whether a job has ended after at least ``starts`` starts; if it is requeued, it starts now."""
        self.release(job_id)
        job = self.job(job_id)
        return job["JobState"] in ENDED and int(job["Restarts"]) + 1 >= starts

    def wait(self, *job_ids: str, timeout: float = 300, starts: int = 1) -> list[dict[str, str]]:
        """Wait until jobs have ended, and what the controller says about each then."""
        self.until(
            lambda: not [job_id for job_id in job_ids if not self.ended(job_id, starts=starts)],
            timeout,
            f"jobs {', '.join(job_ids)} do not end",
        )
        return [self.job(job_id) for job_id in job_ids]

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def _daemon(self, *command: str) -> None:
        path = Path(shutil.which(command[0], path=_PATH) or command[0])
        with (self.folder / f"{command[0]}.out.log").open("ab") as log:
            daemon = subprocess.Popen(
                [str(path), *command[1:]], env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        self._daemons.append(daemon)


class TrainingJob:
    """The example's train.sbatch on a cluster, with a pause in each step."""

    def __init__(
        self,
        cluster: SlurmCluster,
        folder: Path,
        *options: str,
        pace: float = 0.2,
        script: str = "train.sbatch",
        **env: str,
    ) -> None:
        self.cluster, self.folder, self.text = cluster, folder, folder / "job.log"
        shape = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
        place = ("--gpus-per-node=0", "--chdir", str(ROOT), "--output", str(self.text))
        program = {"PACE_SECONDS": str(pace), "TRAIN": f"{sys.executable} {launches.PACED}"}
        self.id = cluster.call(
            *("sbatch", "--parsable", *shape, *place, *options, str(EXAMPLES / "slurm" / script)),
            *launches.arguments(folder, ranks=4, steps=STEPS),
            **launches.environment(**program, **env),
        )

    def until_step(self, step: int, *, timeout: float = 300) -> None:
        """Wait until a step is in the log, letting a requeued job start at once."""
        deadline = time.monotonic() + timeout
        while launches.last_step(self.folder) < step:
            self.cluster.release(self.id)
            job = self.cluster.job(self.id)
            assert job["JobState"] not in ENDED, (job, self.text.read_text())
            assert time.monotonic() < deadline, (job, self.text.read_text())
            time.sleep(0.2)

    def exit_codes(self) -> list[int]:
        """Of the starts that have ended."""
        text = self.text.read_text() if self.text.exists() else ""
        return [int(code) for code in re.findall(r"start \d+: exit code (\d+)", text)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Start a cluster, or skip with the reason where that cannot be."""
    _require_programs()
    # A short path: the socket's may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    running = SlurmCluster(folder)
    try:
        try:
            running.start()
        except (OSError, RuntimeError) as error:
            pytest.skip(f"Slurm does not start here: {error}\n{running.logs()}")
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder, ignore_errors=True)


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _require_programs() -> None:
    if not _missing():
        return
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"Slurm lacks {', '.join(_missing())}, and only root could install it")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(
            ["apt-get", *command], env=environment, capture_output=True, text=True, timeout=240, check=False
        )
    if _missing():
        pytest.skip(f"Slurm cannot be installed here: {done.stderr[-500:]}")


def _missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


def _free_ports() -> list[int]:
    """One port, and two neighbouring ones."""
    for _ in range(50):
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
            for free in sockets[:2]:
                free.bind(("127.0.0.1", 0))
            first = sockets[1].getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                sockets[2].bind(("127.0.0.1", first + 1))
                return [sockets[0].getsockname()[1], first, first + 1]
    raise RuntimeError("no free ports")


# --- what is tested ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def preserved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("preserved")
    arguments = launches.arguments(output, ranks=4, steps=STEPS)
    launches.run(launches.torchrun(4, "--standalone", str(launches.EXAMPLE), *arguments))
    return output


# Stands in for the program, which is rarely there: checks its arguments and runs what follows the image.
APPTAINER = """#!/bin/bash
[ "$1 $2 $3 $5 $7" = "exec --nv --bind --pwd sft.sif" ] || { echo "wrong arguments: $*"; exit 9; }
shift 7 && exec "$@"
"""


def test_steps_and_batch_jobs_train_as_torchrun_does(
    cluster: SlurmCluster, preserved: Path, tmp_path: Path
) -> None:
    step, batch = tmp_path / "step", tmp_path / "batch"
    step.mkdir(), batch.mkdir()
    example = [sys.executable, str(launches.EXAMPLE), *launches.arguments(step, ranks=4, steps=STEPS)]
    done = cluster.srun(
        "--nodes=2", "--ntasks-per-node=2", "--export=ALL", *example, **launches.environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"rank 0 of 4 \(local 0 of 2\) on \w+, gloo, launcher: slurm", done.stdout)
    (apptainer := tmp_path / "apptainer").write_text(APPTAINER)
    apptainer.chmod(0o755)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    job = TrainingJob(
        cluster, batch, script="train-apptainer.sbatch", APPTAINER=str(apptainer), IMAGE="sft.sif", PATH=path
    )
    assert cluster.wait(job.id)[0]["JobState"] == "COMPLETED", job.text.read_text()
    for output in (step, batch):
        difference = launches.largest_difference(output, preserved)
        print(f"srun 2x2, {output.name}: largest difference of a loss {difference:.1e} over {STEPS} steps")
        assert difference <= 1e-6


def test_signals_and_requeues_in_mid_training(cluster: SlurmCluster, preserved: Path, tmp_path: Path) -> None:
    """scancel -s USR1 and scontrol requeue strike one job, scancel ends it, a second job finishes."""
    job = TrainingJob(cluster, tmp_path)
    strikes = (("scancel", "-s", "USR1"), ("scontrol", "requeue"), ("scancel",))
    for number, strike in enumerate(strikes, start=1):
        job.until_step(9 * number)
        cluster.call(*strike, job.id)
        cluster.until(lambda wanted=number: len(job.exit_codes()) >= wanted, 60, "no exit code")
        last = launches.losses(tmp_path)[-1][0]
        saved = launches.sound_steps(tmp_path, ranks=4)
        print(f"{' '.join(strike)}: saved steps {saved}, exit codes {job.exit_codes()}")
        assert saved[-1] == last, "the last step that ran is saved"
    assert job.exit_codes() == [85, 85, 85]
    assert cluster.wait(job.id, starts=3)[0]["JobState"] == "CANCELLED", "what is cancelled stays so"
    again = TrainingJob(cluster, tmp_path, pace=0)
    assert cluster.wait(again.id)[0]["JobState"] == "COMPLETED", again.text.read_text()
    assert again.exit_codes()[-1] == 0
    assert [step for step, *_ in launches.losses(tmp_path)] == list(range(1, STEPS + 1)), "each step once"
    assert launches.losses(tmp_path) == launches.losses(preserved), "losses and norms, bit for bit"


def test_the_time_limit_and_the_signal_before_it(
    cluster: SlurmCluster, preserved: Path, tmp_path: Path
) -> None:
    """Two jobs at once. Slurm sends the signal up to a minute early, and strikes up to 30 s late.

    At the paces here the first start of the job with a limit cannot end before it is struck, nor could the
    second be sure to, so it gets more time.
    """
    options = {"signal": ("--time=2", "--signal=USR1@30"), "limit": ("--time=1", "--signal=CONT@1")}
    jobs = {}
    for name, option in options.items():
        (tmp_path / name).mkdir()
        jobs[name] = TrainingJob(cluster, tmp_path / name, *option, pace={"signal": 2.5, "limit": 2.0}[name])
    cluster.until(jobs["limit"].exit_codes, 300, "no exit code")
    cluster.call("scontrol", "update", f"JobId={jobs['limit'].id}", "TimeLimit=5")
    states = cluster.wait(*(job.id for job in jobs.values()), starts=2, timeout=900)
    for (name, job), ended in zip(jobs.items(), states, strict=True):
        assert ended["JobState"] == "COMPLETED", job.text.read_text()
        codes, saved = job.exit_codes(), launches.sound_steps(job.folder, ranks=4)
        print(f"{options[name]}: exit codes {codes}, saved steps {saved}")
        assert (set(codes[:-1]), codes[-1]) == ({85}, 0)
        assert ("DUE TO TIME LIMIT" in job.text.read_text()) == (name == "limit")
        assert [step for step, *_ in launches.losses(job.folder)] == list(range(1, STEPS + 1))
        assert launches.losses(job.folder) == launches.losses(preserved), "bit for bit"


def test_submitit_queues_the_job_again(cluster: SlurmCluster, preserved: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("submitit is not installed")
    script = str(EXAMPLES / "submitit" / "launch.py")
    shape = ["--nodes", "2", "--ranks-per-node", "2", "--minutes", "20"]
    arguments = launches.arguments(tmp_path, ranks=4, steps=STEPS)
    command = [sys.executable, script, "--logs", str(tmp_path / "logs"), *shape, "--", *arguments]
    submitted = re.search(r"^job (\d+)", launches.run(command, SLURM_CONF=cluster.env["SLURM_CONF"]))
    assert submitted is not None
    cluster.until(lambda: launches.last_step(tmp_path) >= 5, 240, "training does not begin")
    cluster.call("scancel", "-s", "USR1", submitted[1])
    (ended,) = cluster.wait(submitted[1], starts=2)
    logs = "\n".join(path.read_text()[-2000:] for path in sorted((tmp_path / "logs").glob("*_0_log.*")))
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), logs
    assert [step for step, *_ in launches.losses(tmp_path)] == list(range(1, STEPS + 1)), "each step once"
    assert launches.losses(tmp_path) == launches.losses(preserved), "losses and norms, bit for bit"

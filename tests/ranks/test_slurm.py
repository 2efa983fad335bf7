"""A real Slurm of two nodes: equal losses, and whatever ends a job early in mid-training."""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import launches
from tests.harness.places import EXAMPLES
from tests.harness.slurm_cluster import SlurmCluster, TrainingJob, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 40


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def preserved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("preserved")
    example = [str(launches.EXAMPLE), *launches.arguments(output, ranks=4, steps=STEPS)]
    launches.run(launches.torchrun(4, "--standalone", *example))
    return output


# Stands in for the program, which is rarely there: checks its arguments and runs what follows the image.
APPTAINER = """#!/bin/bash
[ "$1 $2 $3 $5 $7" = "exec --nv --bind --pwd sft.sif" ] || { echo "wrong arguments: $*"; exit 9; }
shift 7 && exec "$@"
"""


def _job(
    cluster: SlurmCluster,
    folder: Path,
    *options: str,
    pace: float = 0.2,
    script: str = "train.sbatch",
    **env: str,
) -> TrainingJob:
    shape = {"nodes": 2, "ranks": 4, "steps": STEPS}
    return TrainingJob(cluster, folder, *options, **shape, pace=pace, script=script, **env)


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
    job = _job(
        cluster, batch, script="train-apptainer.sbatch", APPTAINER=str(apptainer), IMAGE="sft.sif", PATH=path
    )
    assert cluster.wait(job.id)[0]["JobState"] == "COMPLETED", job.text.read_text()
    for output in (step, batch):
        difference = launches.largest_difference(output, preserved)
        print(f"srun 2x2, {output.name}: largest difference of a loss {difference:.1e} over {STEPS} steps")
        assert difference <= 1e-6


def test_signals_and_requeues_in_mid_training(cluster: SlurmCluster, preserved: Path, tmp_path: Path) -> None:
    """scancel -s USR1 and scontrol requeue strike one job, scancel ends it, a second job finishes."""
    job = _job(cluster, tmp_path)
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
    again = _job(cluster, tmp_path, pace=0)
    assert cluster.wait(again.id)[0]["JobState"] == "COMPLETED", again.text.read_text()
    assert again.exit_codes()[-1] == 0
    assert [step for step, *_ in launches.losses(tmp_path)] == list(range(1, STEPS + 1)), "each step once"
    assert launches.losses(tmp_path) == launches.losses(preserved), "losses and norms, bit for bit"


def test_the_time_limit_and_the_signal_before_it(
    cluster: SlurmCluster, preserved: Path, tmp_path: Path
) -> None:
    """Two jobs at once. Slurm sends the signal up to a minute early, and strikes up to 30 s late.

    At the paces here the first start of the job with a limit cannot end before it is struck.
    """
    options = {"signal": ("--time=2", "--signal=USR1@30"), "limit": ("--time=1", "--signal=CONT@1")}
    paces = {"signal": 2.5, "limit": 2.0}
    jobs = {}
    for name, option in options.items():
        (tmp_path / name).mkdir()
        jobs[name] = _job(cluster, tmp_path / name, *option, pace=paces[name])
    states = cluster.wait(*(job.id for job in jobs.values()), starts=2, timeout=900)
    for (name, job), ended in zip(jobs.items(), states, strict=True):
        assert ended["JobState"] == "COMPLETED", job.text.read_text()
        codes, saved = job.exit_codes(), launches.sound_steps(job.folder, ranks=4)
        print(f"{options[name]}: exit codes {codes}, saved steps {saved}")
        assert set(codes[:-1]) == {85}
        assert codes[-1] == 0
        assert ("DUE TO TIME LIMIT" in job.text.read_text()) == (name == "limit")
        assert [step for step, *_ in launches.losses(job.folder)] == list(range(1, STEPS + 1))
        assert launches.losses(job.folder) == launches.losses(preserved), "bit for bit"


def test_submitit_queues_the_job_again(cluster: SlurmCluster, preserved: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("submitit is not installed")
    launch = [sys.executable, str(EXAMPLES / "submitit" / "launch.py"), "--logs"]
    shape = ["--nodes", "2", "--ranks-per-node", "2", "--minutes", "20"]
    arguments = launches.arguments(tmp_path, ranks=4, steps=STEPS)
    command = [*launch, str(tmp_path / "logs"), *shape, "--", *arguments]
    submitted = re.search(r"^job (\d+)", launches.run(command, SLURM_CONF=cluster.env["SLURM_CONF"]))
    assert submitted is not None
    cluster.until(lambda: launches.last_step(tmp_path) >= 5, 240, "training does not begin")
    cluster.call("scancel", "-s", "USR1", submitted[1])
    (ended,) = cluster.wait(submitted[1], starts=2)
    logs = "\n".join(path.read_text()[-2000:] for path in sorted((tmp_path / "logs").glob("*_0_log.*")))
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), logs
    assert [step for step, *_ in launches.losses(tmp_path)] == list(range(1, STEPS + 1)), "each step once"
    assert launches.losses(tmp_path) == launches.losses(preserved), "losses and norms, bit for bit"

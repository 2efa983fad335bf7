"""Submit the example to Slurm from Python, with submitit.

    python examples/submitit/launch.py --nodes 2 --ranks-per-node 8 --gpus-per-node 8 -- --output RUN

What follows -- goes to minimal_sft.py, with --resume auto added. Before the time limit, and on preemption,
all ranks save the same step and the job is queued again; that start continues from there.
"""

import argparse
import os
import runpy
import signal
import sys
from pathlib import Path

# Read by submitit on import, here and in the job: its own choice, SIGUSR2, is not one that the example heeds.
os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"

import submitit

import fsdp_sft as fs

EXAMPLES = Path(__file__).resolve().parent.parent


class Train:
    """What each task runs: the example, in this process."""

    def __call__(self, examples: str, arguments: list[str]) -> None:
        """Train; what comes back to submitit is only whether to queue the job again."""
        sys.path.insert(0, examples)
        sys.argv = ["minimal_sft.py", *arguments, "--resume", "auto"]
        with fs.PreemptionGuard() as guard:  # hears from the example's own which signal ended it
            try:
                runpy.run_path(f"{examples}/minimal_sft.py", run_name="__main__")
            except SystemExit as end:
                if end.code != fs.REQUEUE_EXIT_CODE or guard.signal != signal.SIGUSR1:
                    raise  # SIGTERM: the job is cancelled, or Slurm queues it again by itself
        if guard.signal is not None:
            # The guard has given the signal back to submitit, which from rank 0 queues the job again.
            signal.raise_signal(signal.SIGUSR1)

    def checkpoint(self, examples: str, arguments: list[str]) -> submitit.helpers.DelayedSubmission:
        """What the next start runs: the same, as it finds its checkpoints by itself."""
        return submitit.helpers.DelayedSubmission(self, examples, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--logs", type=Path, default=Path("submitit-logs"), help="submitit's folder, seen by all nodes")
    add("--nodes", type=int, default=1)
    add("--ranks-per-node", type=int, default=1)
    add("--gpus-per-node", type=int, default=0)
    add("--cpus-per-rank", type=int, default=1)
    add("--minutes", type=int, default=24 * 60, help="time limit of one start")
    add("--partition", help="Slurm's partition (default: the cluster's)")
    add("arguments", nargs="*", help="for minimal_sft.py, after --")
    args = parser.parse_args()
    executor = submitit.AutoExecutor(args.logs, cluster="slurm", slurm_max_num_timeout=1000)
    executor.update_parameters(
        name="sft",
        nodes=args.nodes,
        tasks_per_node=args.ranks_per_node,
        gpus_per_node=args.gpus_per_node,
        cpus_per_task=args.cpus_per_rank,
        timeout_min=args.minutes,
        slurm_signal_delay_s=300,
        # A task that has saved and ended leaves the others a minute to do the same.
        slurm_srun_args=["--kill-on-bad-exit=0", "--wait=60"],
        **({"slurm_partition": args.partition} if args.partition else {}),
    )
    job = executor.submit(Train(), str(EXAMPLES), args.arguments)
    print(f"job {job.job_id}, logs in {args.logs}", flush=True)


if __name__ == "__main__":
    main()

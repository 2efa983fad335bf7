"""The launcher that started this process, and what it says: torchrun, Slurm, or none."""

import os
import re
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field

# Slurm numbers steps that srun did not start (batch script, interactive shell, ...) from here up:
# https://github.com/SchedMD/slurm/blob/master/slurm/slurm.h (SLURM_BATCH_SCRIPT and its neighbours).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Variables that hold a process's rank on its node. Some launchers set torchrun's variables without
# LOCAL_RANK: OpenMPI, MPICH and Intel MPI, MVAPICH. Operators of Kubernetes mostly set none, since a pod has
# one process.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")
_LOCAL_SIZES = (
    *("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
)
# Numbers of processes that other launchers set: mpirun, MPICH's mpiexec, submitit's local executor.
_FOREIGN_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SUBMITIT_LOCAL_NTASKS")


@dataclass(frozen=True)
class Launch:
    """What a launcher says about this process.

    Attributes:
        launcher: Name of the launcher: ``"torchrun"``, ``"slurm"`` or ``"single"``.
        rank: Rank of the process in the job.
        local_rank: Rank of the process on its node.
        world_size: Number of processes of the job.
        local_world_size: Number of processes on this node.
        init_method: URL at which the ranks meet; None for a single process, which has its own store.
        details: Text for the log line about the launch.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    init_method: str | None
    details: str = field(default="", compare=False)


def detect_launch() -> Launch:
    """This process's place in the job, from environment variables.

    Raises:
        ValueError: If a launcher's variables are incomplete or contradict each other; the message names them.
    """
    if "RANK" in os.environ or "LOCAL_RANK" in os.environ:
        return _torchrun_launch()
    if is_slurm_step():
        return _slurm_launch()
    for name in _FOREIGN_SIZES:
        if name in os.environ and env_int(name) > 1:
            raise ValueError(
                f"{name}={os.environ[name]} is set but RANK is not: start with torchrun or srun, or unset "
                f"{name} to run as a single process"
            )
    return Launch("single", 0, 0, 1, 1, None)


def env_int(name: str, default: int | None = None) -> int:
    """An environment variable that must be a number, and must be set unless there is a default."""
    found = os.environ.get(name) or ("" if default is None else str(default))
    try:
        return int(found)
    except ValueError:
        raise ValueError(
            f"{name}={found!r} is not a number: pass on what the launcher sets (srun --export=ALL, a "
            "container's option), or unset all of it (RANK, LOCAL_RANK, SLURM_STEP_ID, ...) to run alone"
        ) from None


def is_slurm_step() -> bool:
    """Whether srun started this process as a task of a step."""
    # SLURM_PROCID does not tell: inside salloc or a batch script it may be set without any srun. What is
    # started by hand in the shell of ``srun --pty`` of one task of the step inherits its variables. So
    # do tasks of another srun inside it, but they have no terminal.
    step = os.environ.get("SLURM_STEP_ID", "")
    is_shell = "SLURM_PTY_PORT" in os.environ and sys.stdin is not None and sys.stdin.isatty()
    return step.isdigit() and int(step) < _FIRST_SPECIAL_STEP and not is_shell


def restarts_to_set_apart() -> int:
    """The number of restarts that a single torchrun agent has made; 0 otherwise.

    Its store may outlive its workers, with the addresses of those before a restart under the keys that torch
    would use again:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py
    (TORCH_DISABLE_SHARE_RDZV_TCP_STORE). With this number in them keys are new after each restart. Agents of
    several nodes may count differently, so with several agents this is 0.
    """
    return env_int("TORCHELASTIC_RESTART_COUNT", 0) if env_int("GROUP_WORLD_SIZE", 1) == 1 else 0


def _torchrun_launch() -> Launch:
    """The place that torchrun's variables give, or those of a launcher that sets the same."""
    rank, world_size = _rank_of("RANK", "WORLD_SIZE")
    ranks = [env_int(name) for name in _LOCAL_RANKS if os.environ.get(name)]
    sizes = [env_int(name) for name in _LOCAL_SIZES if os.environ.get(name)]
    if not ranks and sizes and sizes[0] != 1:
        raise ValueError(
            f"{sizes[0]} processes are on this node, but LOCAL_RANK is not set: it says which of them this "
            "one is, and so which device is its own"
        )
    # Without either, this process is taken for the only one of its node.
    local_rank, *_ = ranks or [0]
    local_world_size, *_ = sizes or [world_size if ranks else 1]
    # torch takes an IPv6 address only without the brackets that it has in a URL.
    os.environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "").strip("[]")
    details = f"meeting at {os.environ['MASTER_ADDR']}:{env_int('MASTER_PORT')}"
    return Launch("torchrun", rank, local_rank, world_size, local_world_size, "env://", details)


def _slurm_launch() -> Launch:
    """This task's place in its Slurm step, and where the step's ranks meet."""
    tasks = "SLURM_NTASKS" if "SLURM_STEP_NUM_TASKS" not in os.environ else "SLURM_STEP_NUM_TASKS"
    rank, world_size = _rank_of("SLURM_PROCID", tasks)
    where = f"job {os.environ.get('SLURM_JOB_ID', '?')}, step {os.environ['SLURM_STEP_ID']}"
    if world_size == 1:
        return Launch("slurm", 0, 0, 1, 1, None, where)
    address = (os.environ.get("MASTER_ADDR") or _master_address()).strip("[]")
    # By job and step, so that ranks of neighbouring jobs on shared nodes do not meet.
    port = 20000 + (env_int("SLURM_JOB_ID", 0) * 7 + env_int("SLURM_STEP_ID")) % 20000
    port = env_int("MASTER_PORT", port)
    meeting = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
    details = f"{where}, node {os.environ.get('SLURMD_NODENAME', '?')}, meeting at {meeting}"
    return Launch("slurm", rank, env_int("SLURM_LOCALID"), world_size, _local_world_size(), meeting, details)


def _rank_of(rank_name: str, size_name: str) -> tuple[int, int]:
    """(rank, world size) of two variables."""
    rank, world_size = env_int(rank_name), env_int(size_name)
    if not 0 <= rank < world_size:
        raise ValueError(f"{rank_name}={rank} is not in [0, {size_name}={world_size})")
    return rank, world_size


def _local_world_size() -> int:
    """This node's entry of a list such as ``4(x2),3``: four tasks on two nodes, then three on one."""
    listed = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "1")
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(count)] * int(times or 1)
    return counts[min(env_int("SLURM_NODEID", 0), len(counts) - 1)]


def _master_address() -> str:
    """The address of rank 0's node."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    first = _first_host(nodes)
    with suppress(OSError):
        socket.getaddrinfo(first, None)
        return first
    # A node's name may not resolve (several slurmd on one host). Then srun's address is used.
    launch = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if not launch:
        raise ValueError(
            f"the first node {first!r} of SLURM_STEP_NODELIST={nodes!r} has no address; set MASTER_ADDR"
        )
    return launch


def _first_host(nodes: str) -> str:
    """The first name of a Slurm node list such as ``gpu[03-05,9],login1``."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)(?=,|$)", nodes)
    if match is None:  # or a name has several parts in brackets
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} does not say the first node; set MASTER_ADDR")
    return "".join(match.groups(""))

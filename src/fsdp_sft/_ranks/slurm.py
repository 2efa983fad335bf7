"""A task's place in Slurm, from environment variables: its rank, its node, and where the ranks meet."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, field

# Slurm numbers steps that srun did not start (batch script, interactive shell, ...) from here up:
# https://github.com/SchedMD/slurm/blob/master/slurm/slurm.h (SLURM_BATCH_SCRIPT and its neighbours).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


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
        hint: What the user may have meant instead, in words; "" if nothing is suspicious.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    init_method: str | None
    details: str = field(default="", compare=False)
    hint: str = field(default="", compare=False)


def env_int(name: str) -> int:
    """An environment variable that must be a number."""
    found = os.environ.get(name, "")
    try:
        return int(found)
    except ValueError:
        raise ValueError(
            f"{name}={found!r} is not a number: pass on what the launcher sets (srun --export=ALL, a "
            "container's option), or unset all of it (RANK, LOCAL_RANK, SLURM_STEP_ID, ...) to run alone"
        ) from None


def is_slurm_step() -> bool:
    """Whether srun started this process as a task of a step."""
    # SLURM_PROCID does not tell: inside salloc or a batch script it may be set without any srun.
    step = os.environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _FIRST_SPECIAL_STEP and not _is_shell_of_a_step()


def _is_shell_of_a_step() -> bool:
    """Whether this was started by hand in the shell of ``srun --pty``, which one task of the step has."""
    # All processes of that shell inherit the variable. So do tasks of another srun inside it, but they have
    # no terminal.
    return "SLURM_PTY_PORT" in os.environ and sys.stdin is not None and sys.stdin.isatty()


def unused_allocation() -> str:
    """A hint for a single process inside a Slurm allocation for several tasks; else empty."""
    tasks = max(
        (
            env_int(name)
            for name in ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_STEP_NUM_TASKS")
            if os.environ.get(name)
        ),
        default=1,
    )
    if is_slurm_step() or "SLURM_JOB_ID" not in os.environ or tasks == 1:
        return ""
    found = (
        "it is in the shell of srun --pty" if _is_shell_of_a_step() else "SLURM_STEP_ID is not that of a step"
    )
    return (
        f"Slurm job {os.environ['SLURM_JOB_ID']} has {tasks} tasks, but no srun started this process "
        f"({found}), so it runs alone: start it with srun, or torchrun, to use them all"
    )


def slurm_launch() -> Launch:
    """This task's place in its Slurm step, and where the step's ranks meet.

    Raises:
        ValueError: If a variable is missing or wrong; the message names it.
    """
    tasks = "SLURM_NTASKS" if "SLURM_STEP_NUM_TASKS" not in os.environ else "SLURM_STEP_NUM_TASKS"
    rank, local_rank, world_size = env_int("SLURM_PROCID"), env_int("SLURM_LOCALID"), env_int(tasks)
    if not 0 <= rank < world_size:
        raise ValueError(f"SLURM_PROCID={rank} is not in [0, {tasks}={world_size})")
    where = f"job {os.environ.get('SLURM_JOB_ID', '?')}, step {os.environ['SLURM_STEP_ID']}"
    if world_size == 1:
        return Launch("slurm", 0, 0, 1, 1, None, where)
    address = (os.environ.get("MASTER_ADDR") or _master_address()).strip("[]")
    port = env_int("MASTER_PORT") if os.environ.get("MASTER_PORT") else _port()
    meeting = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
    details = f"{where}, node {os.environ.get('SLURMD_NODENAME', '?')}, meeting at {meeting}"
    return Launch("slurm", rank, local_rank, world_size, _local_world_size(), meeting, details)


def _local_world_size() -> int:
    """This node's entry of a list such as ``4(x2),3``: four tasks on two nodes, then three on one."""
    listed = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "1")
    counts: list[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={listed!r} is not a list such as '4(x2),3'")
        counts += [int(match[1])] * int(match[2] or 1)
    node = env_int("SLURM_NODEID") if "SLURM_NODEID" in os.environ else 0
    return counts[min(node, len(counts) - 1)]


def _master_address() -> str:
    """The address of rank 0's node."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    if not nodes:
        raise ValueError("inside a Slurm step, but SLURM_STEP_NODELIST is not set; set MASTER_ADDR")
    first = _first_host(nodes)
    try:
        socket.getaddrinfo(first, None)
    except OSError:
        # A node's name may not resolve (several slurmd on one host). Then srun's address is used.
        launch = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
        if not launch:
            raise ValueError(
                f"the first node {first!r} of SLURM_STEP_NODELIST={nodes!r} has no address; set MASTER_ADDR"
            ) from None
        return launch
    return first


def _first_host(nodes: str) -> str:
    """The first name of a Slurm node list such as ``gpu[03-05,9],login1``."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} is not a Slurm node list; set MASTER_ADDR")
    prefix, numbers, suffix = match[1], match[2], match[3]
    if numbers is None:
        return prefix
    if "[" in suffix:  # a name with several bracketed parts is left to Slurm's own expansion
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=30
        )
        return listed.stdout.split()[0]
    return prefix + re.split(r"[,-]", numbers)[0] + suffix


def _port() -> int:
    """The port at which the ranks of this step meet."""
    # By job and step, so that ranks of neighbouring jobs on shared nodes do not meet.
    job = env_int("SLURM_JOB_ID") if "SLURM_JOB_ID" in os.environ else 0
    step = env_int("SLURM_STEP_ID")
    return 20000 + (job * 7 + step) % 20000

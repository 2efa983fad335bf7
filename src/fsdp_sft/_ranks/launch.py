"""The launcher that started this process, and what it says: torchrun, Slurm, or none."""

import os

from fsdp_sft._ranks.slurm import (
    Launch,
    env_int,
    is_slurm_step,
    slurm_launch,
    unused_allocation,
)

# Variables that hold a process's rank on its node. Some launchers set torchrun's variables without
# LOCAL_RANK: OpenMPI, MPICH and Intel MPI, MVAPICH. Operators of Kubernetes mostly set none, since a pod has
# one process.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")
_LOCAL_SIZES = (
    *("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
)
# Numbers of processes that other launchers set: mpirun, MPICH's mpiexec, submitit's local executor.
_FOREIGN_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SUBMITIT_LOCAL_NTASKS")


def detect_launch() -> Launch:
    """This process's place in the job, from environment variables.

    Raises:
        ValueError: If a launcher's variables are incomplete or contradict each other; the message names them.
    """
    if "RANK" in os.environ or "LOCAL_RANK" in os.environ:
        return _torchrun_launch()
    if is_slurm_step():
        return slurm_launch()
    for name in _FOREIGN_SIZES:
        if name in os.environ and env_int(name) > 1:
            raise ValueError(
                f"{name}={os.environ[name]} is set but RANK is not: start with torchrun or srun, or unset "
                f"{name} to run as a single process"
            )
    return Launch("single", 0, 0, 1, 1, None, hint=unused_allocation())


def _torchrun_launch() -> Launch:
    """The place that torchrun's variables give, or those of a launcher that sets the same."""
    rank, world_size = env_int("RANK"), env_int("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is not in [0, WORLD_SIZE={world_size})")
    local_rank, local_world_size, hint = _place_on_node(world_size)
    # torch takes an IPv6 address only without the brackets that it has in a URL.
    os.environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "").strip("[]")
    details = f"meeting at {os.environ['MASTER_ADDR']}:{env_int('MASTER_PORT')}"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        details += f", restart {_restarts()} of {os.environ.get('TORCHELASTIC_MAX_RESTARTS', '?')}"
    return Launch(
        "torchrun", rank, local_rank, world_size, local_world_size, "env://", details, hint or _restart_hint()
    )


def _place_on_node(world_size: int) -> tuple[int, int, str]:
    """(rank on this node, number of processes on it, a hint if that is only assumed)."""
    sizes = [name for name in _LOCAL_SIZES if os.environ.get(name)]
    ranks = [name for name in _LOCAL_RANKS if os.environ.get(name)]
    if ranks:
        return env_int(ranks[0]), env_int(sizes[0]) if sizes else world_size, ""
    local_world_size = env_int(sizes[0]) if sizes else 1
    if local_world_size != 1:
        raise ValueError(
            f"{sizes[0]}={local_world_size} processes on this node, but LOCAL_RANK is not set: it says which "
            "of them this one is, and so which device is its own"
        )
    hint = (
        "LOCAL_RANK is not set: this process is taken for the only one of its node, with one device; if "
        "there are more, start torchrun in its place"
    )
    return 0, 1, hint if world_size > 1 else ""


def restarts_to_set_apart() -> int:
    """The number of restarts, if they share a store; 0 otherwise.

    A torchrun agent may keep a store that outlives its workers, with the addresses of the workers before a
    restart under the keys that torch would use again:
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py
    (TORCH_DISABLE_SHARE_RDZV_TCP_STORE). With this number in them keys are new after each restart. Agents of
    several nodes may count differently, so with several agents this is 0.
    """
    return _restarts() if _shares_agent_store() and not _several_agents() else 0


def _restarts() -> int:
    name = "TORCHELASTIC_RESTART_COUNT"
    return env_int(name) if name in os.environ else 0


def _several_agents() -> bool:
    """Whether several torchrun agents run this job."""
    return os.environ.get("GROUP_WORLD_SIZE", "1") != "1"


def _shares_agent_store() -> bool:
    """Whether the workers meet over a store in torchrun's agent."""
    return (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"
    )


def _restart_hint() -> str:
    """A warning if a restart over several nodes would find old addresses in the store."""
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if not (may_restart and _several_agents() and _shares_agent_store()):
        return ""
    return (
        "a restart over several nodes would meet the addresses of the workers before it: start torchrun "
        "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node"
    )

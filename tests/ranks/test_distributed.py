"""init_distributed under each launcher's variables, and the meshes."""

import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port

import fsdp_sft as fs
from fsdp_sft._compat.groups import careful_gloo
from fsdp_sft._ranks import agree, init as module
from fsdp_sft._ranks.init import DistributedContext, detect_launch
from tests.harness import launches
from tests.harness.models import FLOAT32, full, oracle_gradients, ragged_batches, tiny_model
from tests.harness.ranks import device_here, device_type, mesh_here, on_ranks, run_distributed

# As Kubeflow's operator and others set them for a pod.
ON_A_POD = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "localhost,other",
    "SLURM_JOB_ID": "77",
}
ELASTIC = {
    "TORCHELASTIC_RUN_ID": "r",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GROUP_WORLD_SIZE": "1",
}
ALL = {
    *(*TORCHRUN, *STEP, *ELASTIC, "SLURM_NTASKS", "SLURM_NNODES", "LOCAL_WORLD_SIZE"),
    *(
        "SLURM_LAUNCH_NODE_IPADDR",
        "SLURM_NODELIST",
        "OMPI_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "SUBMITIT_LOCAL_NTASKS",
    ),
    *("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "SLURM_PTY_PORT"),
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ALL:
        monkeypatch.delenv(name, raising=False)

    def set_to(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_to


ALONE = ("single", 0, 0, 1, 1, None)


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, ALONE),
        ({**TORCHRUN, **STEP, "LOCAL_WORLD_SIZE": "4"}, ("torchrun", 3, 1, 8, 4, "env://")),
        (STEP, ("slurm", 5, 1, 6, 2, "tcp://localhost:20539")),
        ({**STEP, "SLURM_STEP_ID": "", "SLURM_NTASKS": "6"}, ALONE),
        ({**STEP, "SLURM_STEP_ID": "4294967290"}, ALONE),  # an interactive step
        ({**STEP, "SLURM_STEP_ID": "4294967291"}, ALONE),  # the batch script
        (
            {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2),1,4", "SLURM_LOCALID": "0"},
            ("slurm", 5, 0, 6, 1, "tcp://localhost:20539"),
        ),
        (ON_A_POD, ("torchrun", 3, 0, 8, 1, "env://")),
        ({**ON_A_POD, "LOCAL_WORLD_SIZE": "1"}, ("torchrun", 3, 0, 8, 1, "env://")),
    ],
)
def test_the_place_of_a_process(environment: Any, variables: dict[str, str], launch: tuple[Any, ...]) -> None:
    environment(**variables)
    names = ("launcher", "rank", "local_rank", "world_size", "local_world_size", "init_method")
    assert attrgetter(*names)(detect_launch()) == launch


def test_restarts_of_one_agent_are_kept_apart(environment: Any) -> None:
    environment(**TORCHRUN, **ELASTIC)
    for agents, restarts in (("1", 1), ("2", 0)):  # several count their own
        environment(GROUP_WORLD_SIZE=agents)
        store = dist.HashStore()  # type: ignore[attr-defined,unused-ignore]
        module._own_keys(store, 0)
        assert store.check([f"restart-{restarts}/meetings-of-0"])


def test_what_was_found_is_logged_before_the_ranks_meet(
    environment: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(**{**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    found: list[str] = []
    monkeypatch.setattr(module, "_meet", lambda *_: found.extend(caplog.messages))
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    with caplog.at_level("INFO", logger="fsdp_sft"):
        fs.init_distributed(device_type="cpu")
    assert found == [f"rank 0 of 1 on {socket.gethostname()}, cpu, launcher: slurm job 77, step 0"]


def test_devices(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    for count, local_rank, index in ((1, 3, 0), (2, 1, 1)):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda count=count: count)
        launch = DistributedContext(3, local_rank, 8, 4, torch.device("cpu"), "", "slurm")
        assert module._select_device("cuda", launch) == torch.device("cuda", index)
    assert chosen == [0, 1]
    with pytest.raises(ValueError, match=r"local rank 2 .* sees 2 of type cuda \(CUDA_VISIBLE_DEVICES=4,5\)"):
        module._select_device("cuda", DistributedContext(2, 2, 4, 4, torch.device("cpu"), "", "torchrun"))
    with pytest.raises(ValueError, match="this process sees 0 of type xpu"):
        module._select_device("xpu", launch)


def test_slurm_addresses(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(
        **{
            **STEP,
            "SLURM_STEP_NODELIST": "no-such-node[1-2].invalid",
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.7",
        }
    )
    assert detect_launch().init_method == "tcp://127.0.0.7:20539"
    environment(MASTER_ADDR="head", MASTER_PORT="123")
    assert detect_launch().init_method == "tcp://head:123"
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR")
    with pytest.raises(ValueError, match=r"'no-such-node.*' is not known or has no address; set MASTER"):
        detect_launch()
    environment(SLURM_STEP_NODELIST="rack[1-2]n[3]", SLURM_LAUNCH_NODE_IPADDR="127.0.0.7")
    with pytest.raises(ValueError, match=r"rack\[1-2\]n\[3\]' is not known .*; set MASTER_ADDR"):
        detect_launch()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a1,b2", "a1"), ("gpu[03-05,9],x", "gpu03"), ("n[7]-ib", "n7-ib"), ("g[1,4]", "g1")],
)
def test_first_host_of_a_node_list(
    nodes: str, first: str, environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(**{**STEP, "SLURM_STEP_NODELIST": nodes})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    assert detect_launch().init_method == f"tcp://{first}:20539"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE='' is not a number"),
        ({"LOCAL_RANK": "0"}, "RANK='' is not a number"),
        ({**ON_A_POD, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_RANK='' is not a number"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, "MASTER_PORT='' is not a number"),
        ({**TORCHRUN, "RANK": "8"}, r"RANK=8 is not in \[0, WORLD_SIZE=8\)"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a number"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set but RANK is not"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http' is not a number"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR expected, but not set"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 is set but RANK is not"),
        ({"SUBMITIT_LOCAL_NTASKS": "2"}, "SUBMITIT_LOCAL_NTASKS=2 is set but RANK is not"),
        ({**STEP, "SLURM_PROCID": "6"}, "SLURM_PROCID=6"),
        ({**STEP, "MASTER_PORT": "x"}, "MASTER_PORT='x' is not a number"),
        ({**STEP, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID='x' is not a number"),
        (
            {k: v for k, v in STEP.items() if k not in ("SLURM_PROCID", "SLURM_LOCALID")},
            "SLURM_PROCID='' is not a number: pass on what the launcher sets",
        ),
        (
            {k: v for k, v in STEP.items() if k != "SLURM_STEP_NUM_TASKS"},
            "SLURM_NTASKS='' is not a number",
        ),
    ],
)
def test_half_set_variables_are_named(environment: Any, variables: Any, message: str) -> None:
    environment(**variables)
    with pytest.raises(ValueError, match=message):
        fs.init_distributed()
    assert not dist.is_initialized()


@on_ranks(4)
def test_an_existing_group_is_used_and_meshes_are_checked() -> None:
    context, rank = fs.init_distributed(), dist.get_rank()
    assert (context.launcher, context.rank, context.local_rank) == ("existing", rank, rank)
    assert (context.world_size, context.is_main, context.device) == (4, rank == 0, device_here())
    assert fs.init_distributed() == context, "calling it again changes nothing"
    meshes = [
        fs.build_mesh(**given) for given in ({}, {"dp_replicate": 2}, {"dp_replicate": 4, "dp_shard": 1})
    ]
    assert [(mesh.mesh_dim_names, mesh.mesh.tolist()) for mesh in meshes] == [
        (("dp_shard",), [0, 1, 2, 3]),
        (("dp_replicate", "dp_shard"), [[0, 1], [2, 3]]),
        (("dp_replicate", "dp_shard"), [[0], [1], [2], [3]]),
    ]
    for arguments, message in (
        ({"dp_replicate": 3}, "dp_replicate=3 x dp_shard=1 makes 3 ranks, but the job has 4"),
        ({"dp_replicate": 2, "dp_shard": 4}, "makes 8 ranks, but the job has 4"),
        ({"dp_shard": -4}, "makes -4 ranks, but the job has 4"),
        ({"dp_replicate": 0}, "dp_replicate=0 x dp_shard=4 makes 0 ranks, but the job has 4"),
    ):
        with pytest.raises(ValueError, match=message):
            fs.build_mesh(**arguments)
    for step, local in (("", rank), ("0", 7)):  # outside of a step the id is that of the shell
        pytest.MonkeyPatch().setattr(os, "environ", {"SLURM_LOCALID": "7", "SLURM_STEP_ID": step})
        assert module._existing_launch().local_rank == local


def test_a_mesh_needs_a_group() -> None:
    with pytest.raises(RuntimeError, match="init_distributed"):
        fs.build_mesh()


SCRIPT = """
import json, sys
import torch, torch.distributed as dist
import fsdp_sft as fs
context = fs.init_distributed()
total = torch.tensor([context.rank + 1.0])
dist.all_reduce(total)
mesh = fs.build_mesh()
out = [context.launcher, context.rank, context.local_rank, context.world_size, float(total), mesh.size()]
with open(f"{sys.argv[1]}/{context.rank}.json", "w") as file:
    json.dump([*out, str(context)], file)
dist.barrier()
dist.destroy_process_group()
"""


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    subprocess.run(
        launches.torchrun(2, "--standalone", str(script), str(tmp_path)),
        env={name: value for name, value in os.environ.items() if name not in ALL},
        timeout=120,
        check=True,
    )
    for rank in range(2):
        *values, text = json.loads((tmp_path / f"{rank}.json").read_text())
        assert values == ["torchrun", rank, rank, 2, 3.0, 2]
        assert text.startswith(f"rank {rank} of 2 (local {rank} of 2) on ")


def _again(port: int) -> list[int]:
    """Five process groups one after the other over one store, each with gradients on a mesh of 2 x 2."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.destroy_process_group()
    sums = []
    for number in range(5):
        fs.init_distributed(device_type=device_type())
        total = torch.ones(1, device=device_here())
        dist.all_reduce(total)
        sums.append(int(total))
        # To torch two meshes of one shape are equal, also where the groups behind one of them are gone.
        others = [dist.new_group() for _ in range(number)]
        model = fs.shard_model(tiny_model("llama"), mesh=mesh_here(dp_replicate=2))
        model(input_ids=torch.tensor([[3, 4, 5]])).logits.sum().backward()
        for parameter in model.parameters():
            assert torch.isfinite(parameter.grad.full_tensor()).all()
        del others
        if number < 4:
            dist.destroy_process_group()
    return sums


def test_a_process_group_can_be_made_again() -> None:
    assert run_distributed(_again, 4, get_free_port()) == [[4] * 5] * 4


@on_ranks(2)
def test_a_rank_that_has_met_others_before_meets_these() -> None:
    if dist.get_rank() == 1:  # has met them over another store
        module._own_keys(dist.HashStore(), 1)  # type: ignore[attr-defined,unused-ignore]
    assert fs.init_distributed().world_size == 2


def _count_sockets() -> tuple[int, int]:
    # A thread of gloo's takes connections in, those of the group's own beginning too.
    time.sleep(0.5)
    before = _sockets()
    for _ in range(3):
        agree.all_reduce_sum([1.0])
    time.sleep(0.5)
    return before, _sockets()


def _sockets() -> int:
    return sum(
        link.is_symlink() and os.readlink(link).startswith("socket:")
        for link in Path("/proc/self/fd").iterdir()
    )


def test_a_rank_connects_to_those_it_talks_to() -> None:
    # A socket that listens, and one for each edge of the tree over eight ranks, at both of its ends; two if
    # both ends began at once. With a connection between every two ranks these would be 56, seven of each.
    added = [after - before - 1 for before, after in run_distributed(_count_sockets, 8)]
    assert 2 * 7 <= sum(added) <= 2 * 2 * 7
    assert max(added) < 7
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ


@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_an_address_of_ipv6(address: str, environment: Any) -> None:
    environment(**{**STEP, "MASTER_ADDR": address, "MASTER_PORT": "29500"})
    assert detect_launch().init_method == "tcp://[::1]:29500"
    environment(**{**TORCHRUN, "MASTER_ADDR": address})
    assert "meeting at ::1:1" in detect_launch().details
    assert os.environ["MASTER_ADDR"] == "::1"


def test_the_shell_of_srun_is_no_task(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(**STEP, SLURM_PTY_PORT="40000")
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115  as tasks of another srun from there have it
    assert detect_launch().launcher == "slurm"
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    assert detect_launch().launcher == "single"


def test_a_rank_that_waits_long_for_the_others_says_so(
    monkeypatch: pytest.MonkeyPatch, environment: Any, caplog: pytest.LogCaptureFixture
) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    environment(**{**TORCHRUN, **meeting, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})
    monkeypatch.setattr(module, "_LONG_SECONDS", 0.2)
    with pytest.raises(RuntimeError):
        fs.init_distributed(device_type="cpu", timeout=timedelta(seconds=2))
    assert "rank 0 of 2" in caplog.text
    assert "still waits for the other ranks (launcher: torchrun, meeting at 127.0.0.1" in caplog.text


def test_gloo_works_with_one_thread() -> None:
    """Two would write to one string: see ``careful_gloo``. If torch's own has one, ours can go."""
    import torch.distributed.distributed_c10d as c10d

    original = c10d.ProcessGroupGloo
    assert original._Options()._threads == 2
    with careful_gloo(), careful_gloo():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert c10d.ProcessGroupGloo is original
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    try:
        assert isinstance(backend, original)
        assert backend.options._threads == 1
        dist.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()


# --- one set of ranks a job, one mesh a model: where the mesh of a call comes from -------------------------

_ROWS = 23


def _calls_without_a_model(**given: Any) -> list[Callable[[], Any]]:
    batch = ragged_batches(1)[0]
    return [
        lambda: fs.ResumableSampler(_ROWS, **given).num_replicas,
        lambda: fs.PackedSampler([3] * _ROWS, max_length=8, **given).rank,
        lambda: fs.PackedStream([], max_length=8, **given).num_replicas,
        lambda: fs.ResumableSampler(fs.Mixture([_ROWS, _ROWS]), **given).rank,
        lambda: len(list(fs.windows([batch, batch], 1, **given))),
        lambda: fs.count_targets([batch], **given),
        lambda: float(fs.scale_for_backward(torch.tensor(6.0), num_targets=2, **given)),
    ]


def _without_a_model(**given: Any) -> list[Any]:
    """What each call that gets no model makes of its mesh."""
    return [call() for call in _calls_without_a_model(**given)]


@on_ranks(4)
def test_without_a_model_the_only_mesh_is_taken_and_of_two_none() -> None:
    rank = dist.get_rank()
    early = fs.ResumableSampler(_ROWS)  # made before any mesh
    mesh = mesh_here(cp=2)
    expected = _without_a_model(mesh=mesh)
    assert expected[:4] == [2, rank // 2, 2, rank // 2]
    assert _without_a_model() == expected
    assert (early.num_replicas, early.rank) == (2, rank // 2)
    mesh_here(cp=2, dp_replicate=2, dp_shard=1)  # shares rows alike, which leaves nothing to ask
    assert _without_a_model() == expected
    started_anew = pickle.loads(pickle.dumps(fs.ResumableSampler(_ROWS)))
    other = mesh_here()
    for call in _calls_without_a_model():
        with pytest.raises(ValueError, match=r"has made .*cp=2.* and .*dp_shard=4.* by mesh="):
            call()
    with pytest.raises(ValueError, match="by mesh="):
        _ = early.num_replicas
    assert (started_anew.num_replicas, started_anew.rank) == (2, rank // 2)
    assert _without_a_model(mesh=mesh) == expected
    assert _without_a_model(mesh=other)[:4] == [4, rank, 4, rank]


@on_ranks(4)
def test_each_model_knows_its_mesh() -> None:
    """A teacher and a student on meshes of their own, over the same ranks."""
    rank = dist.get_rank()
    meshes = {"student": mesh_here(), "teacher": mesh_here(dp_replicate=2)}
    models = {
        name: fs.shard_model(tiny_model("llama"), mesh=mesh, mp_policy=FLOAT32)
        for name, mesh in meshes.items()
    }
    batches = ragged_batches(8)
    loss, expected = oracle_gradients(tiny_model("llama"), batches)
    targets = fs.count_targets(batches[rank::4], mesh=meshes["student"])
    for model in models.values():
        for batch in batches[rank::4]:
            fs.causal_lm_loss(model, batch, num_targets=targets).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(full(parameter.grad), expected[name], rtol=1e-5, atol=1e-7)
        assert fs.evaluate(model, batches[rank::4]).loss == pytest.approx(loss, rel=1e-6)


@on_ranks(4)
def test_a_mesh_of_some_ranks_is_refused() -> None:
    part = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("job", "dp_shard"))["dp_shard"]
    for call in _calls_without_a_model(mesh=part):
        with pytest.raises(ValueError, match="leaves out some of the 4 ranks"):
            call()
    model = fs.shard_model(tiny_model("llama"), mesh=part, mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {name: value.to(device_here()) for name, value in ragged_batches(1)[0].items()}
    for call in (
        lambda: fs.train_step(model, [batch], optimizer),
        lambda: fs.evaluate(model, [batch]),
        lambda: fs.causal_lm_loss(model, batch, num_targets=3),
        lambda: fs.loss_sum(model, batch),
        lambda: fs.prepare_loss(model),
        lambda: fs.verify_packing(model, max_length=64),
    ):
        with pytest.raises(fs.UnsupportedModelError, match="leaves out some of the 4 ranks"):
            call()

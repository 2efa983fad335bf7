"""Each fault is planted in one rank, and named with it; healthy ranks are accused of nothing."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import transformers as tf

import fsdp_sft as fs
from fsdp_sft import check
from fsdp_sft._process.gpus import GIB
from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft.check import CheckedJob, Problem, host_name, machines, parity as of_layers
from fsdp_sft.check.command import CHECKS, Done, lines_of, ordered, run_check, to_json
from tests.harness import multimodal
from tests.harness.models import LATENT, TINY, tiny_config
from tests.harness.ranks import run_distributed

RANKS, VICTIM = 3, 1


@dataclass(frozen=True)
class Fault:
    """What is wrong on one rank.

    Attributes:
        check: The check that has to notice it.
        says: What its problem has to say.
        plant: Context in which the rank has it.
        everywhere: Context that all ranks are in.
        level: Of the problem.
    """

    check: str
    says: str
    plant: Callable[[Path], Any]
    everywhere: Callable[[int], Any] = lambda rank: mock.patch.dict(os.environ)
    level: str = "fail"


def _late(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, 50 ms later."""

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return function(*args, **kwargs)

    return late


def _off_by_one(*args: Any) -> torch.Tensor:
    result = torch.matmul(args[0], args[1].T)
    result[5, 7] += 1
    return result


def _zeros(function: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that leaves zeros."""

    def zeros(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        if kwargs.get("async_op"):
            work.wait()
        (args[0] if args else kwargs["output"]).zero_()
        return work

    return zeros


@contextmanager
def _accelerated(seconds: float) -> Iterator[None]:
    """Context in which each rank has a device of its own, whose products take so long."""
    with (
        mock.patch.object(check, "ACCELERATORS", ("cpu",)),
        mock.patch.object(machines, "_SHAPE", machines._SHAPE_ON_CPU),
        mock.patch.object(machines, "_fastest", return_value=seconds),
    ):
        yield


def _free_memory(gib: float) -> Any:
    """Context in which so much of a device's memory is free."""
    return mock.patch.object(check, "memory_of_device", return_value=(int(gib * GIB), 80 * GIB))


def _reductions(of: Callable[..., Any]) -> Any:
    names = ("reduce_scatter_single", "reduce_scatter_tensor")  # of the check, and of FSDP2
    return mock.patch.multiple(dist, **{name: of(getattr(dist, name)) for name in names})


FAULTS = {
    "versions": Fault(
        "environment", "torch is 1.0, and", lambda _: mock.patch.object(torch, "__version__", "1.0")
    ),
    "a variable": Fault(
        "environment",
        "NCCL_ALGO is Tree, and not set elsewhere",
        lambda _: mock.patch.dict(os.environ, NCCL_ALGO="Tree"),
    ),
    "a slow device": Fault(
        "products",
        "products run at 0.50 of the others' rate",
        lambda _: mock.patch.object(machines, "_fastest", return_value=2.0),
        lambda _: _accelerated(1.0),
    ),
    "a wrong product": Fault(
        "products",
        "products are wrong",
        lambda _: mock.patch.object(torch.nn.functional, "linear", _off_by_one),
    ),
    "reductions of zeros": Fault(
        "reductions", "wrong results: reduce_scatter", lambda _: _reductions(_zeros)
    ),
    "a slow link": Fault(
        "network", "its links run at", lambda _: mock.patch.object(dist, "send", _late(dist.send))
    ),
    "a slow link to other nodes": Fault(
        "network",
        "its links to other nodes run at",
        lambda _: mock.patch.object(dist, "send", _late(dist.send)),
        lambda rank: mock.patch.object(socket, "gethostname", return_value=f"node-{rank}"),
    ),
    "no folder": Fault(
        "folder",
        "No such file or directory",
        lambda _: mock.patch.object(
            Path, "mkdir", side_effect=FileNotFoundError(2, "No such file or directory")
        ),
    ),
    "a blind rank": Fault(
        "folder",
        "does not see what rank 0 has renamed",
        lambda _: mock.patch.object(os, "listdir", return_value=["old"]),
    ),
    "a full disk": Fault(
        "folder",
        "No space left on device",
        lambda _: mock.patch.object(
            machines, "sync_file", side_effect=OSError(28, "No space left on device")
        ),
    ),
    "a device of which others have most": Fault(
        "environment", "20.0 of 80.0 GiB", lambda _: _free_memory(20.0), lambda _: _free_memory(79.5)
    ),
    "a device of which others have some": Fault(
        "environment", "70.0 of 80.0 GiB", lambda _: _free_memory(70.0), lambda _: _free_memory(79.5), "warn"
    ),
    "an error": Fault(
        "products",
        "raised ValueError: no products today",
        lambda _: mock.patch.object(machines, "exact_product", side_effect=ValueError("no products today")),
    ),
}


def _job(root: Path, *, replicas: int = 1, cp: int = 1, **training: Any) -> CheckedJob:
    training.setdefault("config", of_layers.truncated_config(None))
    context = fs.init_distributed()
    mesh = fs.build_mesh(dp_replicate=replicas, cp=cp, device_type=context.device.type)
    job = CheckedJob(context, all_gather_objects(host_name()), mesh=mesh, **training)
    job.folder = root / "own"
    if job.context.rank == 0:
        job.folder.mkdir(exist_ok=True)
    dist.barrier()
    return job


def _found(names: list[str], path: Path) -> dict[str, list[Problem]]:
    """What each fault makes its check say, on this rank."""
    found = {}
    for name in names:
        fault = FAULTS[name]
        own = path / name.replace(" ", "-")
        own.mkdir(exist_ok=True)
        dist.barrier()
        with fault.everywhere(dist.get_rank()), mock.patch.object(machines, "_SEEN_WITHIN", 1.0):
            job = _job(own)
            with fault.plant(own) if job.context.rank == VICTIM else mock.patch.dict(os.environ):
                found[name] = run_check(job, fault.check).problems
    return found


def test_every_fault_is_named_with_its_rank(tmp_path: Path) -> None:
    results = run_distributed(_found, RANKS, list(FAULTS), tmp_path)
    assert all(result == results[0] for result in results)
    for name, fault in FAULTS.items():
        (problem,) = results[0][name]
        assert (problem.ranks, problem.level) == ((VICTIM,), fault.level), problem
        assert fault.says in problem.text
        assert problem.exclude or "device" not in name


def _healthy(root: Path) -> tuple[str, dict[str, Any]]:
    job = _job(root)
    done: list[Done] = [run_check(job, name) for name in CHECKS]
    problems = ordered([problem for one in done for problem in one.problems])
    return "\n".join(lines_of(job, done, problems)), to_json(job, done, problems)


@pytest.mark.accelerator
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_healthy_ranks_are_accused_of_nothing(ranks: int, tmp_path: Path) -> None:
    for text, found in run_distributed(_healthy, ranks, tmp_path):
        assert [one for one in found["problems"] if one["level"] == "fail"] == [], text
        assert found["healthy"], text
        assert json.loads(json.dumps(found)) == found
        unseen = {name for name, one in found["checks"].items() if one["verdict"] == "-"}
        assert unseen == ({"network", "reductions"} if ranks == 1 else set()), text


def _config(family: str) -> Any:
    if family in multimodal.CONFIGS:
        return multimodal.CONFIGS[family]()
    if family == "deepseek_v3":  # whose first three layers are dense
        experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
        return tf.DeepseekV3Config(**LATENT, **experts, num_hidden_layers=5)
    if family == "phimoe":  # whose router is random while it trains
        return tf.PhimoeConfig(**TINY, num_hidden_layers=4, num_local_experts=4)
    return tiny_config(family, num_hidden_layers=4)


def _parity(root: Path, family: str | None, training: dict[str, Any], *, planted: bool) -> Done:
    config = of_layers.truncated_config(
        None if family is None else _config(family), ep_size=training.get("ep_size", 1)
    )
    job = _job(root, config=config, **training)
    # Workers that compile would stay, and cost the rank its place in the pool.
    alone = torch._inductor.config.patch(compile_threads=1)
    with (
        alone,
        _reductions(_zeros) if planted and job.context.rank == VICTIM else mock.patch.dict(os.environ),
    ):
        return run_check(job, "parity")


def test_parity_sees_gradients_that_are_not_reduced(tmp_path: Path) -> None:
    done = run_distributed(_parity, 2, tmp_path, None, {}, planted=True)[0]
    texts = [one.text for one in done.problems]
    assert any("gradient norm" in text and "in one process (float32)" in text for text in texts), texts


def _moved(root: Path) -> bool:
    job = _job(root)
    of_layers._write(job.config, root / "model")
    ids, labels, own = of_layers._batches(job)
    _, before, after = of_layers._trained(
        job, root / "model", {"input_ids": ids[own], "labels": labels[own]}, torch.float32
    )
    return any(not torch.equal(weight, after[name]) for name, weight in before.items())


def test_weights_of_one_rank_are_held_against_what_they_were(tmp_path: Path) -> None:
    assert run_distributed(_moved, 1, tmp_path) == [True]


FEATURES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "cp": ("llama", {"cp": 2}),
    "nf4": (None, {"frozen_dtype": "nf4"}),
    "ep": ("mixtral", {"ep_size": 2}),
    "replicas": (None, {"replicas": 2}),
    "windows": ("gemma3", {}),
    "tied": ("qwen2-tied", {"frozen_dtype": "bfloat16"}),
    "fp8": ("llama", {"frozen_dtype": "fp8"}),
    "compiled": (None, {"compile": True}),
    "dense first": ("deepseek_v3", {"ep_size": 2}),
    "random routing": ("phimoe", {}),
    "a tower": ("qwen2.5-vl", {"frozen_dtype": "nf4"}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_what_is_asked_for_trains_as_in_one_process(feature: str, tmp_path: Path) -> None:
    done = run_distributed(_parity, 2, tmp_path, *FEATURES[feature], planted=False)[0]
    assert done.problems == []
    assert "bfloat16 within" in done.said
    assert "of one process" in done.said

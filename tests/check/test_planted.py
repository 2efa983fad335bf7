"""Each fault is planted in one rank, and named with it; healthy ranks are accused of nothing."""

import json
import os
import signal
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
from fsdp_sft._process.devices import synchronize
from fsdp_sft.check.checks import folder, parity
from fsdp_sft.check.cluster import Asked, Cluster, make_cluster
from fsdp_sft.check.mechanism import Outcome, Trouble
from fsdp_sft.check.raised import Raised
from fsdp_sft.check.results import ordered, text_of, to_json
from fsdp_sft.check.sequence import all_checks, run_checks
from tests.harness import multimodal
from tests.harness.models import LATENT, TINY, tiny_config
from tests.harness.ranks import run_distributed

RANKS, VICTIM = 3, 1


@dataclass(frozen=True)
class Fault:
    """What is wrong on one rank.

    Attributes:
        check: The check that has to notice it.
        says: What its trouble has to say.
        plant: Context in which the rank has it.
        everywhere: Context that all ranks are in.
        level: Of the trouble.
    """

    check: str
    says: str
    plant: Callable[[Path], Any]
    everywhere: Callable[[int], Any] = lambda rank: mock.patch.dict(os.environ)
    level: str = "fail"


def _slowed(function: Callable[..., Any], times: float = 2.1) -> Callable[..., Any]:
    """The function, which takes as many times as long, on any device."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        synchronize(args[0].device)
        start = time.perf_counter()
        result = function(*args, **kwargs)
        synchronize(args[0].device)
        until = start + times * (time.perf_counter() - start) + 2e-5
        while time.perf_counter() < until:
            pass
        return result

    return slow


@contextmanager
def _held_back() -> Iterator[None]:
    """Context in which this process stands still for two thirds of the time, as one below a quota does."""
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.02))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.03)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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


def _no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def _reductions(of: Callable[..., Any]) -> Any:
    names = ("reduce_scatter_single", "reduce_scatter_tensor")  # of the check, and of FSDP2
    return mock.patch.multiple(dist, **{name: of(getattr(dist, name)) for name in names})


FAULTS = {
    "versions": Fault("versions", "torch 1.0", lambda _: mock.patch.object(torch, "__version__", "1.0")),
    "a variable": Fault(
        "variables",
        "NCCL_ALGO=Tree, and NCCL_ALGO is not set",
        lambda _: mock.patch.dict(os.environ, NCCL_ALGO="Tree"),
    ),
    "a secret": Fault(
        "variables",
        "HF_TOKEN=set, not shown, and HF_TOKEN=set, not shown elsewhere",
        lambda _: mock.patch.dict(os.environ, HF_TOKEN="hf_other"),
        lambda _: mock.patch.dict(os.environ, HF_TOKEN="hf_secret"),
    ),
    "a clock": Fault(
        "machine",
        r"its clock is 5.0 s ahead of",
        lambda _: mock.patch.object(time, "time", lambda at=time.time: at() + 5),
    ),
    "a late clock": Fault(
        "machine",
        r"its clock is 5.0 s behind",
        lambda _: mock.patch.object(time, "time", lambda at=time.time: at() - 5),
    ),
    "a slow device": Fault(
        "products",
        "of the others' rate",
        lambda _: mock.patch.object(torch.nn.functional, "linear", _slowed(torch.nn.functional.linear)),
    ),
    "a rank that is held back": Fault("products", "of the others' rate", lambda _: _held_back()),
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
    "no rename": Fault("folder", "is not seen under its new name", lambda _: mock.patch.object(os, "rename")),
    "a blind rank": Fault(
        "folder",
        "renames of the other ranks are not seen",
        lambda path: mock.patch.object(os, "listdir", return_value=[f"new-{VICTIM}"]),
    ),
    "a full disk": Fault(
        "folder",
        "No space left on device",
        lambda _: mock.patch("fsdp_sft.check.checks.folder.sync_file", _no_space),
    ),
    "an error": Fault(
        "products",
        "raised ValueError: no products today",
        lambda _: mock.patch(
            "fsdp_sft.check.checks.products.checksum", side_effect=ValueError("no products today")
        ),
    ),
}


def _cluster(root: Path, **asked: Any) -> Cluster:
    cluster = make_cluster(fs.init_distributed(), Asked(root=root, seconds=12.0, **asked))
    cluster.folder = root / "own"
    if cluster.rank == 0:
        cluster.folder.mkdir(exist_ok=True)
    dist.barrier()
    return cluster


def _found(names: list[str], path: Path) -> dict[str, list[Trouble]]:
    """What each fault makes its check say, on this rank."""
    found = {}
    for name in names:
        fault = FAULTS[name]
        own = path / name.replace(" ", "-")
        own.mkdir(exist_ok=True)
        dist.barrier()
        with fault.everywhere(dist.get_rank()), mock.patch.object(folder, "_SEEN_WITHIN", 1.0):
            cluster = _cluster(own)
            checks = [one for one in all_checks() if one.name == fault.check]
            with fault.plant(own) if cluster.rank == VICTIM else mock.patch.dict(os.environ):
                done = run_checks(cluster, checks)
        found[name] = [trouble for one in done for trouble in one.outcome.troubles]
    return found


def test_every_fault_is_named_with_its_rank(tmp_path: Path) -> None:
    results = run_distributed(_found, RANKS, list(FAULTS), tmp_path)
    assert all(result == results[0] for result in results)
    missed = {
        name: found
        for name, found in results[0].items()
        if [
            one
            for one in found
            if one.ranks == (VICTIM,) and FAULTS[name].says in one.text and one.level == "fail"
        ]
        != found
        or not found
    }
    assert not missed, "\n".join(f"{name}: {found}" for name, found in missed.items())


def _healthy(root: Path) -> tuple[str, dict[str, Any], list[Trouble]]:
    cluster = _cluster(root)
    done = run_checks(cluster, all_checks())
    troubles = ordered([trouble for one in done for trouble in one.outcome.troubles])
    return text_of(cluster, done, "", troubles, 1.0), to_json(cluster, done, "", troubles, 1.0), troubles


@pytest.mark.accelerator
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_healthy_ranks_are_accused_of_nothing(ranks: int, tmp_path: Path) -> None:
    for text, found, troubles in run_distributed(_healthy, ranks, tmp_path):
        assert [one for one in troubles if one.level == "fail"] == [], text
        assert found["healthy"], text
        assert json.loads(json.dumps(found)) == found
        seen = {name for name, one in found["checks"].items() if one["measured"] or one["said"]}
        assert {"products", "parity", "folder"} <= seen
        assert ranks == 1 or {"network", "reductions"} <= seen


def _little_memory(root: Path) -> tuple[str, list[Trouble]]:
    cluster = _cluster(root)
    asked = getattr(torch.accelerator, "get_memory_info", None)
    has_little = mock.patch.object(torch.accelerator, "get_memory_info", return_value=(10 << 30, 80 << 30))
    with has_little if cluster.rank == VICTIM and asked is not None else mock.patch.dict(os.environ):
        (done,) = run_checks(cluster, [one for one in all_checks() if one.name == "devices"])
    return cluster.device.type, list(done.outcome.troubles)


@pytest.mark.accelerator
def test_a_device_whose_memory_others_have_is_named(tmp_path: Path) -> None:
    for device, troubles in run_distributed(_little_memory, 2, tmp_path):
        assert device == "cpu" or [(one.level, one.ranks) for one in troubles] == [("fail", (VICTIM,))]
        assert device == "cpu" or "10.0 of 80.0 GiB" in troubles[0].text


def _config(family: str) -> Any:
    if family in multimodal.CONFIGS:
        return multimodal.CONFIGS[family]()
    if family == "deepseek_v3":  # whose first three layers are dense
        experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
        return tf.DeepseekV3Config(**LATENT, **experts, num_hidden_layers=5)
    if family == "phimoe":  # whose router is random while it trains
        return tf.PhimoeConfig(**TINY, num_hidden_layers=4, num_local_experts=4)
    return tiny_config(family, num_hidden_layers=4)


def _parity(root: Path, family: str | None, asked: dict[str, Any], *, planted: bool) -> Outcome:
    config = None if family is None else _config(family)
    cluster = _cluster(root, config=config, **asked)
    # Workers that compile would stay, and cost the rank its place in the pool.
    alone = torch._inductor.config.patch(compile_threads=1)
    with alone, _reductions(_zeros) if planted and cluster.rank == VICTIM else mock.patch.dict(os.environ):
        (done,) = run_checks(cluster, [one for one in all_checks() if one.name == "parity"])
    return done.outcome


def test_parity_sees_gradients_that_are_not_reduced(tmp_path: Path) -> None:
    outcome = run_distributed(_parity, 2, tmp_path, None, {}, planted=True)[0]
    texts = [one.text for one in outcome.troubles]
    assert any("gradient norm" in text and "in one process (float32)" in text for text in texts), texts


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
    outcome = run_distributed(_parity, 2, tmp_path, *FEATURES[feature], planted=False)[0]
    assert outcome.troubles == ()
    assert "of one process" in outcome.said


def _left(root: Path) -> str:
    """What is known of a rank that leaves a check which the others are in."""
    cluster = _cluster(root)
    raised = Raised(cluster)
    planted = mock.patch.object(parity, "sharded_model", side_effect=ValueError("no model today"))
    checks = [one for one in all_checks() if one.name == "parity"]
    with (
        planted if cluster.rank == VICTIM else mock.patch.dict(os.environ),
        pytest.raises(fs.RemoteRankError),
    ):
        run_checks(cluster, checks, raised=raised)
    told = raised.told()
    dist.barrier()
    raised.withdraw()
    return told


def test_a_rank_that_leaves_a_check_says_why(tmp_path: Path) -> None:
    assert run_distributed(_left, 2, tmp_path) == [f"rank {VICTIM} raised ValueError: no model today"] * 2

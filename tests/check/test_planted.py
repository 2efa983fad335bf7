"""Each fault is planted in one rank, and named with it; healthy ranks are accused of nothing."""

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import transformers as tf

import fsdp_sft as fs
from fsdp_sft import check
from fsdp_sft._model.blocks import decoder_blocks
from fsdp_sft._process.gpus import GIB
from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft.check import CheckedJob, Problem, host_name, machines, parity as of_layers
from fsdp_sft.check.command import CHECKS, Done, lines_of, ordered, run_check, sharded_model, to_json
from fsdp_sft.check.parity import _LEAST, _compare_steps, truncated_config
from fsdp_sft.planner.model import build_model
from tests.harness import multimodal
from tests.harness.models import LATENT, TINY, tiny_config
from tests.harness.ranks import run_distributed

RANKS, VICTIM = 3, 1


class Fault(NamedTuple):
    """What is wrong on one rank."""

    check: str  # that has to notice it
    says: str
    plant: Callable[[], Any]  # the context in which the rank has it
    everywhere: Callable[[int], Any] = lambda rank: nullcontext()  # the context that all ranks are in
    level: str = "fail"


def _late(function: Callable[..., Any]) -> Callable[..., Any]:

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return function(*args, **kwargs)

    return late


def _off_by_one(*args: Any) -> torch.Tensor:
    result = torch.matmul(args[0], args[1].T)
    result[5, 7] += 1
    return result


def _zeros(function: Callable[..., Any]) -> Callable[..., Any]:

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
        mock.patch.object(check, "ACCELERATORS", ("cpu", "sim")),
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
        "environment", "torch is 1.0, and", lambda: mock.patch.object(torch, "__version__", "1.0")
    ),
    "a variable": Fault(
        "environment",
        "NCCL_ALGO is Tree, and not set elsewhere",
        lambda: mock.patch.dict(os.environ, NCCL_ALGO="Tree"),
    ),
    "a slow device": Fault(
        "products",
        "products run at 0.50 of the others' rate",
        lambda: mock.patch.object(machines, "_fastest", return_value=2.0),
        lambda _: _accelerated(1.0),
    ),
    "a wrong product": Fault(
        "products",
        "products are wrong",
        lambda: mock.patch.object(torch.nn.functional, "linear", _off_by_one),
    ),
    "reductions of zeros": Fault("reductions", "wrong results: reduce_scatter", lambda: _reductions(_zeros)),
    "a slow link": Fault(
        "network", "its links run at", lambda: mock.patch.object(dist, "send", _late(dist.send))
    ),
    "a slow link to other nodes": Fault(
        "network",
        "its links to other nodes run at",
        lambda: mock.patch.object(dist, "send", _late(dist.send)),
        lambda rank: mock.patch.object(socket, "gethostname", return_value=f"node-{rank}"),
    ),
    "no folder": Fault(
        "folder",
        "No such file or directory",
        lambda: mock.patch.object(
            Path, "mkdir", side_effect=FileNotFoundError(2, "No such file or directory")
        ),
    ),
    "a blind rank": Fault(
        "folder",
        "does not see what rank 0 has renamed",
        lambda: mock.patch.object(os, "listdir", return_value=["old"]),
    ),
    "a full disk": Fault(
        "folder",
        "No space left on device",
        lambda: mock.patch.object(machines, "sync_file", side_effect=OSError(28, "No space left on device")),
    ),
    "a device of which others have most": Fault(
        "environment", "20.0 of 80.0 GiB", lambda: _free_memory(20.0), lambda _: _free_memory(79.5)
    ),
    "a device of which others have some": Fault(
        "environment", "70.0 of 80.0 GiB", lambda: _free_memory(70.0), lambda _: _free_memory(79.5), "warn"
    ),
    "an error": Fault(
        "products",
        "raised ValueError: no products today",
        lambda: mock.patch.object(machines, "exact_product", side_effect=ValueError("no products today")),
    ),
}


def _job(
    root: Path,
    *,
    replicas: int = 1,
    cp: int = 1,
    config: Any = None,
    frozen_dtype: str | None = None,
    **training: Any,
) -> CheckedJob:
    context = fs.init_distributed()
    mesh = fs.build_mesh(dp_replicate=replicas, cp=cp, device_type=context.device.type)
    config = truncated_config(None) if config is None else config
    job = CheckedJob(context, all_gather_objects(host_name()), config, mesh, frozen_dtype)
    job.folder, job.sharded = root / "own", lambda *given: sharded_model(job, *given, **training)
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
            with fault.plant() if job.context.rank == VICTIM else nullcontext():
                found[name] = run_check(job, fault.check).problems
    return found


def test_every_fault_is_named_with_its_rank(tmp_path: Path) -> None:
    first, *others = run_distributed(_found, RANKS, list(FAULTS), tmp_path)
    assert others == [first] * (RANKS - 1)
    for name, fault in FAULTS.items():
        (problem,) = first[name]
        assert (problem.ranks, problem.level) == ((VICTIM,), fault.level), problem
        assert fault.says in problem.text
        assert problem.exclude or "device" not in name


def _healthy(root: Path) -> tuple[str, dict[str, Any]]:
    job = _job(root)
    done = [run_check(job, name) for name in CHECKS]
    given = (job, done, ordered([problem for one in done for problem in one.problems]))
    return "\n".join(lines_of(*given)), to_json(*given)


@pytest.mark.accelerator
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_healthy_ranks_are_accused_of_nothing(ranks: int, tmp_path: Path) -> None:
    for text, found in run_distributed(_healthy, ranks, tmp_path):
        levels = {one["level"] for one in found["problems"]}
        assert ("fail" in levels, found["healthy"]) == (False, True), text
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
    config = truncated_config(family and _config(family), experts_by=training.get("ep_size", 1))
    job = _job(root, config=config, **training)
    fault = _reductions(_zeros) if planted and job.context.rank == VICTIM else nullcontext()
    # Workers that compile would stay, and cost the rank its place in the pool.
    with torch._inductor.config.patch(compile_threads=1), fault:
        return run_check(job, "parity")


def test_parity_sees_gradients_that_are_not_reduced(tmp_path: Path) -> None:
    texts = [one.text for one in run_distributed(_parity, 2, tmp_path, None, {}, planted=True)[0].problems]
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
    "compiled": (None, {"compiled": True}),
    "dense first": ("deepseek_v3", {"ep_size": 2}),
    "random routing": ("phimoe", {}),
    "a tower": ("qwen2.5-vl", {"frozen_dtype": "nf4"}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_what_is_asked_for_trains_as_in_one_process(feature: str, tmp_path: Path) -> None:
    done = run_distributed(_parity, 2, tmp_path, *FEATURES[feature], planted=False)[0]
    assert done.problems == []
    assert re.search("bfloat16 within.* of one process", done.said)


# --- parity: the layers that are tried, and what is taken for rounding -------------------------------------

EXPERTS = {"n_routed_experts": 64, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}

CONFIGS: dict[str, tuple[Any, int]] = {
    "dense": (lambda: tf.LlamaConfig(**{**TINY, "num_hidden_layers": 9}), 2),
    "dense first": (
        lambda: tf.DeepseekV3Config(**LATENT, **EXPERTS, num_hidden_layers=9, first_k_dense_replace=3),
        4,
    ),
    "a window first": (
        lambda: tf.Gemma3TextConfig(**{**TINY, "num_hidden_layers": 12, "head_dim": 8, "sliding_window": 8}),
        6,
    ),
    "a computed list of layers": (
        lambda: tf.JambaConfig(
            **{
                **TINY,
                "num_hidden_layers": 8,
                "attn_layer_period": 4,
                "attn_layer_offset": 2,
                "num_experts": 4,
            }
        ),
        3,
    ),
    "shared caches": (
        lambda: tf.Gemma3nTextConfig(
            **{**TINY, "num_hidden_layers": 15, "num_kv_shared_layers": 5, "head_dim": 8, "laurel_rank": 4}
        ),
        5,
    ),
    "ids that may not be None": (lambda: tf.CwmConfig(**{**TINY, "num_hidden_layers": 8, "head_dim": 8}), 2),
    "all of one kind each": (lambda: tf.DiffLlamaConfig(**{**TINY, "num_hidden_layers": 9}), 2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_truncated_config(name: str) -> None:
    make, layers = CONFIGS[name]
    config = make()
    config.vocab_size = 50_000
    short = truncated_config(config)
    assert len(decoder_blocks(build_model(short, torch.float32))) == short.num_hidden_layers == layers
    assert short.vocab_size <= 1024
    assert config.num_hidden_layers > layers, "the config itself stays as it is"


def test_a_decoder_that_is_no_model_alone_stays_in_the_whole() -> None:
    text = {
        **TINY,
        "num_hidden_layers": 5,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default"},
    }
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    short = truncated_config(tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    assert (short.model_type, short.get_text_config(decoder=True).num_hidden_layers) == ("qwen2_5_vl", 2)
    assert len(decoder_blocks(build_model(short, torch.float32))) == 2
    alone = tf.Gemma3Config(text_config={**TINY, "head_dim": 8, "num_hidden_layers": 8})
    assert truncated_config(alone).model_type == "gemma3_text"


@pytest.mark.parametrize(("ranks", "experts"), [(1, 16), (2, 16), (32, 32), (48, 64)])
def test_fewer_experts_leave_the_router_a_choice(ranks: int, experts: int) -> None:
    config = CONFIGS["dense first"][0]()
    short = truncated_config(config, experts_by=ranks)
    assert (short.n_routed_experts, config.n_routed_experts) == (experts, 64)


def test_a_published_quantisation_is_left_out() -> None:
    config = tf.LlamaConfig(
        **TINY, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    assert "quantization_config" not in truncated_config(config).to_dict()


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        ([(4.001, 4.1), (4.001, 3.1)], []),  # the other step of one process is as far off
        ([(4.1, 4.0), (4.0, 3.0)], ["loss 4.1 in step 1, 4.002 in one process (bfloat16) and 4 in float32"]),
        (
            [(4.0, 4.0), (4.0, 2.0)],
            ["gradient norm 2 in step 2, 3 in one process (bfloat16) and 3 in float32"],
        ),
        ([(4.0, float("nan")), (4.0, 3.0)], ["gradient norm nan in step 1, 4.08"]),
    ],
)
def test_rounding_is_what_one_process_has(ours: list[tuple[float, float]], says: list[str]) -> None:
    rounded = [(4.002, 4.08), (4.002, 3.0)]
    found = list(_compare_steps("bfloat16", ours, rounded, [(4.0, 4.0), (4.0, 3.0)], _LEAST[torch.bfloat16]))
    assert [said in text for text, said in zip(found, says, strict=True)] == [True] * len(says)

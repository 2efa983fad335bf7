"""Plans from what ``fsdp-sft check`` has measured: constants replaced, sources said, bad files refused."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import fsdp_sft as fs
from fsdp_sft._process.gpus import gpu_named
from fsdp_sft.commands import main
from fsdp_sft.planner.measured import FORMAT, Measured, measured_from
from fsdp_sft.planner.rates import RATES
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.setup import make_setup

CONFIG = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=16, vocab_size=32000
)
JOB: dict[str, Any] = {"num_gpus": 16, "seq_length": 4096, "global_batch_size": 32, "gpu": "h100"}
NODES = ["a"] * 8 + ["b"] * 8


def _check(**measured: dict[str, Any]) -> dict[str, Any]:
    """What a check on 16 H100 on 2 nodes could have written."""
    rates = {
        "products": {"flops_per_second": 600e12, "float32_flops_per_second": 60e12},
        "attention": {"flops_per_second": 300e12, "operation_seconds": 5e-6, "dtype": "bfloat16"},
        "memory": {"bytes_per_second": 2.5e12},
        "host link": {"bytes_per_second": 20e9},
        "network": {
            "axes": {
                "dp_shard": {"spans": "nodes", "bytes_per_second": {"all_gather": {"1": 1e9, "2": 80e9}}}
            }
        },
        "contention": {"share": 0.2},
        "folder": {"read_bytes_per_second": 2e9, "write_bytes_per_second": 1e9},
        **measured,
    }
    return {
        "format": FORMAT,
        "healthy": True,
        "world_size": 16,
        "hosts": NODES,
        "device_type": "cuda",
        "device": "NVIDIA H100 80GB HBM3",
        "checks": {name: {"measured": values} for name, values in rates.items()},
    }


def _setup() -> Any:
    return make_setup(Run(num_gpus=16, micro_batch_size=1, seq_length=4096, gpu="h100"))


def test_every_constant_is_replaced_and_what_was_not_seen_stays() -> None:
    known = measured_from(_check())
    assert known is not None
    setup = known.applied(_setup())
    gpu, rates = setup.device, setup.rates
    assert gpu.flops_per_second * gpu.achievable * rates.products == 600e12
    assert gpu.flops_per_second * gpu.achievable * rates.attention == pytest.approx(300e12)
    assert gpu.flops_per_second * gpu.achievable * rates.products * rates.wide == pytest.approx(60e12)
    assert gpu.memory_bytes_per_second * rates.memory == 2.5e12
    assert gpu.host_bytes_per_second * rates.host_link == 20e9
    assert gpu.gpus_per_node * gpu.bytes_per_second * rates.network == 80e9
    assert (rates.contention, rates.operation) == (0.2, 5e-6)
    sheet = gpu_named("h100")
    assert gpu.node_bytes_per_second * rates.network == sheet.node_bytes_per_second * RATES.network
    said = {line.partition(",")[0]: line.partition(", ")[2] for line in rates.sources}
    assert said["memory 2.5e+03 GB/s"] == "measured on 16 ranks"
    assert said["link within a node 360 GB/s"] == "data sheet and published runs"
    empty = Measured(device="NVIDIA H100 80GB HBM3", num_ranks=8, ranks_per_node=8, healthy=True)
    unseen = empty.applied(_setup())
    assert unseen.device == sheet
    assert replace(unseen.rates, sources=()) == RATES


def test_a_slower_machine_makes_a_slower_plan(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    file.write_text(json.dumps(_check()))
    sheet, found = (fs.plan_run(CONFIG, **JOB, measured=given)[0] for given in (None, file))
    assert found.time.compute > sheet.time.compute
    assert sheet.constants == ()
    assert len(found.constants) >= 7
    assert found.to_dict()["constants"] == list(found.constants)
    slower = _check(products={"flops_per_second": 60e12}, attention={})
    assert fs.plan_run(CONFIG, **JOB, measured=slower)[0].time.total > 3 * found.time.total


def test_the_command_takes_the_machines_from_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CONFIG.save_pretrained(tmp_path)
    file = tmp_path / "check.json"
    file.write_text(json.dumps({**_check(), "healthy": False}))
    job = ["--model", str(tmp_path), "--measured", str(file), "--seq", "4096", "--global-batch", "32"]
    assert main(["plan", *job]) == 0
    printed = capsys.readouterr().out
    assert "on 16 x h100" in printed
    assert "network of a node 80 GB/s, measured on 16 ranks" in printed
    assert "the check found something wrong" in printed
    assert "saving a step" in printed
    assert main(["plan", *job, "--gpu", "a100"]) == 2
    assert "was measured on NVIDIA H100" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["format", "hosts", "checks", "world_size"])
def test_what_no_check_has_written_is_refused(place: str, tmp_path: Path) -> None:
    found = _check()
    del found[place]
    file = tmp_path / "check.json"
    file.write_text(json.dumps(found))
    for given in (file, found):
        with pytest.raises(ValueError, match="fsdp-sft check writes"):
            fs.plan_run(CONFIG, **JOB, measured=given)


@pytest.mark.parametrize("rate", [0, -1, "fast", True, [1], float("inf")])
def test_rates_that_are_none_are_refused(rate: Any, tmp_path: Path) -> None:
    found = copy.deepcopy(_check(memory={"bytes_per_second": rate}))
    file = tmp_path / "check.json"
    file.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"bytes_per_second must be a positive number|Infinity|JSON"):
        fs.plan_run(CONFIG, **JOB, measured=file)
    with pytest.raises(TypeError, match=r"path of a check\.json"):
        fs.plan_run(CONFIG, **JOB, measured=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"world_size": 1e999}, "of inf ranks, and has hosts of 16"),
        ({"world_size": -3}, "of -3 ranks, and has hosts of 16"),
        ({"hosts": []}, "of 16 ranks, and has hosts of 0"),
        ({"hosts": "a" * 16}, "hosts is no list"),
        (
            {"checks": {"products": {"measured": {"flops_per_second": 10**400}}}},
            "lacks what fsdp-sft check writes",
        ),
        ({"device": None}, None),
    ],
)
def test_a_damaged_file_is_told_with_its_name(
    change: dict[str, Any], says: str | None, tmp_path: Path
) -> None:
    found = {**_check(), **change}
    if says is None:
        del found["device"]
    file = tmp_path / "check.json"
    file.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=says or "lacks what fsdp-sft check writes: 'device'") as caught:
        measured_from(file)
    assert str(file) in str(caught.value)


def test_a_device_that_the_planner_does_not_know_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "check.json"
    file.write_text(json.dumps({**_check(), "device": "Fast Card 9"}))
    assert main(["plan", "--model", "gpt2", "--measured", str(file)]) == 2
    assert "was measured on Fast Card 9, which the planner does not know" in capsys.readouterr().err

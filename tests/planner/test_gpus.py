"""GPUs by name, and how much of their memory tensors can have."""

import pytest

import fsdp_sft as fs
from fsdp_sft._process.gpus import GIB, MIB, gpu_named
from fsdp_sft.planner.estimate import budget_of
from tests.planner.families import LLAMA_8B


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("h100", 81559 / 1024),
        ("H100 ", 81559 / 1024),
        ("h100-96gb", 97871 / 1024),
        ("a100", 80),
        ("a100-40gb", 40),
        ("4090", 24564 / 1024),
        ("mine=48,362,864", 48),
    ],
)
def test_sizes(name: str, gib: float) -> None:
    assert gpu_named(name).memory_bytes == pytest.approx(gib * GIB, rel=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        *("v100", "h100-", "h100-80gb", "", 5),
        *("=48,1,1", "mine=", "mine=48", "mine=48,1", "mine=48,1,1,1", "mine=-1,1,1", "mine=nan,1,1"),
        *("mine=48,1,1,lonk=3", "mine=48,1,1,link=0", "mine=48,inf,1", "mine=48,1,1,per_node=0.5"),
        *("mine=48,1,1,per_node=2.5", "mine=1e-12,1,1"),
    ],
)
def test_what_is_not_known_is_refused(name: str) -> None:
    described = "a GPU is described as NAME=GiB,TFLOPs,GB/s"
    with pytest.raises(ValueError, match=described if "=" in str(name) else "gpu must be one of gb200"):
        gpu_named(name)


def test_a_description() -> None:
    mine = gpu_named("mine=48,362,864,link=100,per_node=4,network=25")
    assert (mine.memory_bytes, mine.flops_per_second) == (48 * GIB, 362e12)
    assert (mine.memory_bytes_per_second, mine.node_bytes_per_second) == (864e9, 100e9)
    assert (mine.bytes_per_second, mine.gpus_per_node) == (25e9, 4)
    notes = fs.estimate_memory(
        LLAMA_8B, fs.Run(num_gpus=4, micro_batch_size=1, seq_length=512, gpu="mine=48,362,864")
    ).notes
    assert any("mine was never compared" in note for note in notes)


def test_what_is_taken_is_named() -> None:
    one, eight, many = (budget_of(gpu_named("h100"), count) for count in (1, 8, 64))
    assert one.usable_bytes > eight.usable_bytes > many.usable_bytes > 0.93 * 81559 * MIB
    assert [name for name, _ in one.taken] == ["driver", "CUDA context", "fragments"]
    assert "NCCL" in str(eight)
    assert eight.memory_bytes - eight.usable_bytes == sum(size for _, size in eight.taken)

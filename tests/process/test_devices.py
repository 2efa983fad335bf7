"""What an accelerator is asked, on one that is not called cuda."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft._process import devices
from fsdp_sft._process.streams import LateValues, travelling
from fsdp_sft.loss.blocks import products_for
from tests.harness.models import tiny_model
from tests.simulated.ranks import run_simulated

SLOW = 0.02  # seconds that a copy to the device takes
MIB = 1 << 20


def test_an_index_or_none_without_an_accelerator() -> None:
    assert {devices.resolve_device(asked) for asked in (None, "cpu")} == {torch.device("cpu")}
    assert devices.device_name(torch.device("cpu")) is None
    # A CUDA build of torch takes the index for a GPU's, whether there is one or not.
    with pytest.raises((RuntimeError, ValueError), match=r"accelerator|counts no memory of cuda devices"):
        fs.memory_stats(0)
    with pytest.raises(ValueError, match="counts no memory of cuda devices here; got cuda:0"):
        fs.memory_stats("cuda:0")


def _memory() -> dict[str, Any]:
    index = torch.accelerator.current_device_index()
    fs.reset_peak_memory()  # of what this rank has run before
    base = fs.memory_stats()
    held = torch.empty(MIB, dtype=torch.uint8, device="sim")
    during = fs.memory_stats(index)
    del held
    after = fs.memory_stats(f"sim:{index}")
    return {
        "during": during["allocated_bytes"] - base["allocated_bytes"],
        "peak": after["peak_allocated_bytes"] - base["allocated_bytes"],
        "after": after["allocated_bytes"] - base["allocated_bytes"],
        "reset": fs.reset_peak_memory(),
        "peak after reset": fs.memory_stats()["peak_allocated_bytes"] - base["allocated_bytes"],
        "other device": fs.memory_stats(1 - index)["allocated_bytes"],
        "touched": torch.sim.touched(),
    }


@pytest.mark.parametrize("index", [0, 1])
def test_memory_of_an_accelerator_of_any_name(index: int) -> None:
    assert run_simulated(_memory, 1, first_device=index)[0] == {
        "during": MIB,
        "peak": MIB,
        "after": 0,
        "reset": True,
        "peak after reset": 0,
        "other device": 0,
        "touched": [index],
    }


def _memory_that_nobody_counts() -> None:
    def memory_stats(index: int) -> dict[str, Any]:
        raise RuntimeError("Allocator for sim is not a DeviceAllocator.")

    torch.accelerator.memory_stats = memory_stats
    for device in ("sim", "xpu"):
        with pytest.raises(ValueError, match=f"counts no memory of {device} devices"):
            fs.memory_stats(device)


def test_memory_that_torch_does_not_count_is_an_error_that_says_so() -> None:
    run_simulated(_memory_that_nobody_counts, 1)


def _paused_while_the_device_works() -> tuple[float, list[int]]:
    meter = fs.ThroughputMeter(world_size=1, warmup_steps=0)
    target = torch.empty(1, device="sim")
    for _ in range(10):  # queued and not waited for
        target.copy_(torch.ones(1).pin_memory(), non_blocking=True)
    with meter.paused():
        pass
    meter.update(num_tokens=1)
    return meter.stats()["step_seconds"] or 0.0, torch.sim.touched()


def test_queued_work_is_not_taken_for_a_pause() -> None:
    seconds, touched = run_simulated(_paused_while_the_device_works, 1, first_device=1, copy_delay=SLOW)[0]
    assert seconds > 9 * SLOW
    assert touched == [1]


def _mixed_products() -> list[Any]:
    names = []
    for able in (False, True):
        devices.has_mixed_products.cache_clear()
        own = torch.mm

        def mm(a: torch.Tensor, b: torch.Tensor, able: bool = able, own: Any = own, **kwargs: Any) -> Any:
            if "out_dtype" not in kwargs:
                return own(a, b, **kwargs)
            if not able:
                raise NotImplementedError("mm.dtype")
            return own(a.float(), b.float())

        torch.mm = mm
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            names.append(type(products_for(torch.ones(4, 4, dtype=dtype, device="sim"), 2)).__name__)
        torch.mm = own
    return [*names, torch.sim.touched()]


def test_products_of_16_bits_into_32_wherever_a_device_has_them() -> None:
    assert run_simulated(_mixed_products, 1, first_device=1)[0] == [
        "_Rounded",
        "Products",
        "Products",
        "_Mixed",
        "_Mixed",
        "Products",
        [1],
    ]


@pytest.mark.parametrize(("vectors", "of_bfloat16"), [("AVX512", "_Rounded"), ("AVX2", "Products")])
def test_a_cpu_keeps_the_products_that_are_fast_there(
    vectors: str, of_bfloat16: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    kinds = [type(products_for(torch.ones(4, 4, dtype=t), 2)).__name__ for t in (torch.bfloat16, torch.half)]
    assert kinds == [of_bfloat16, "Products"]


def _peak() -> tuple[float | None, list[str]]:
    asked: list[str] = []

    def name(device: Any) -> str:
        asked.append(str(device))
        return "NVIDIA H100 80GB HBM3"

    torch.sim.get_device_name = name
    return fs.peak_flops_per_second(), asked


def test_the_peak_is_that_of_the_devices_name() -> None:
    assert run_simulated(_peak, 1, first_device=1) == [(989.4e12, ["sim:1"])]
    assert fs.peak_flops_per_second("cpu") is None


def _memory_beside(root: Path) -> dict[str, int]:
    """The most that calls have in use on the device beside what was there, in bytes."""
    found: dict[str, int] = {}

    def count(name: str, call: Any) -> Any:
        before = torch.sim.memory_allocated()
        torch.sim.reset_peak_memory_stats()
        result = call()
        found[name] = torch.sim.max_memory_allocated() - before
        return result

    context = fs.init_distributed()
    with torch.device("meta"):
        meta = tiny_model("llama")
    count("shard_model of a meta model", lambda: fs.shard_model(meta))
    model = fs.shard_model(tiny_model("llama").to(context.device))
    count("save_full_state_dict", lambda: fs.save_full_state_dict(model, root / "full.safetensors"))
    count("export_hf", lambda: fs.export_hf(model, root / "out"))
    return found


def test_saving_and_exporting_take_nothing_of_the_device(tmp_path: Path) -> None:
    for found in run_simulated(_memory_beside, 2, tmp_path):
        assert found == {"shard_model of a meta model": 0, "save_full_state_dict": 0, "export_hf": 0}


def _chunked_loss() -> tuple[int, int]:
    rows, width, vocabulary, chunk = 256, 64, 8000, 32
    hidden = torch.randn(rows, width, device="sim", requires_grad=True)
    weight = torch.randn(vocabulary, width, device="sim", requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows,), device="sim")
    before = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    fs.linear_cross_entropy_sum(hidden, weight, labels, chunk_size=chunk).backward()
    promised = 4 * chunk * vocabulary + hidden.nbytes + weight.nbytes
    return torch.sim.max_memory_allocated() - before, promised + 4 * 4 * chunk * width


def test_the_chunked_loss_takes_its_logits_and_gradients() -> None:
    counted, promised = run_simulated(_chunked_loss, 1)[0]
    assert 0.9 * promised < counted <= promised


def _on_a_device_that_is_not_current() -> list[float]:
    source, arriving = torch.arange(4.0).pin_memory(), torch.zeros(4, device="sim:1")
    for _ in range(10):  # queued there and not waited for
        arriving.copy_(source, non_blocking=True)
    total = arriving.sum()
    with torch.accelerator.device_index(0):
        return LateValues([total, total * 2]).read()


def test_late_values_of_a_device_that_is_not_current() -> None:
    assert run_simulated(_on_a_device_that_is_not_current, 1, first_device=1, copy_delay=SLOW) == [
        [6.0, 12.0]
    ]


def _travelling() -> tuple[list[str], list[str], bool]:
    device = torch.device("sim", 0)
    batch = torch.arange(1 << 20)  # more than CUDA takes at once from memory that is not pinned
    with torch.sim.record_syncs() as plain:
        batch.to(device, non_blocking=True)
    with torch.sim.record_syncs() as ours:
        moved = travelling(batch, device)
    return [sync.kind for sync in plain], [sync.kind for sync in ours], torch.equal(moved.cpu(), batch)


def test_the_host_does_not_wait_for_a_batch_to_arrive() -> None:
    assert run_simulated(_travelling, 1, copy_delay=SLOW) == [(["copy from pageable memory"], [], True)]

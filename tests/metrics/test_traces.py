"""Traces of chosen steps, and what they say about a rank."""

import gzip
import json
import time

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft.metrics import StepProfiler, aggregate_metrics
from tests.harness.device import asked, device_here, mesh_here
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import run_distributed

SLOW = 0.6  # seconds of a forward; much longer than other work on the machine delays one


def train(profiler, steps):
    weight = torch.ones(8, 8, requires_grad=True)
    for step in steps:
        with torch.profiler.record_function(f"the body of step {step}"):
            (weight @ weight).sum().backward()
        profiler.end_step(step)


def bodies(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    names = {event.get("name", "") for event in events}
    return sorted(int(name.split()[-1]) for name in names if str(name).startswith("the body of step"))


class TestStepProfiler:
    @pytest.mark.parametrize(("first", "last"), [(2, 3), (1, 1), (4, 6)])
    def test_exactly_the_steps_asked_for(self, tmp_path, first, last):
        with StepProfiler(tmp_path / "traces", first_step=first, last_step=last) as profiler:
            train(profiler, range(1, 8))
        assert profiler.trace == tmp_path / "traces" / f"rank-0-steps-{first}-{last}.json.gz"
        assert bodies(profiler.trace) == list(range(first, last + 1))

    def test_a_run_that_ends_early_leaves_what_there_is(self, tmp_path):
        with StepProfiler(tmp_path, first_step=2, last_step=9) as profiler:
            train(profiler, range(1, 4))
        assert profiler.trace.name == "rank-0-steps-2-3.json.gz"
        assert bodies(profiler.trace) == [2, 3]

    def test_a_run_that_never_comes_there(self, tmp_path):
        profiler = StepProfiler(tmp_path, first_step=5, last_step=6)
        with pytest.warns(UserWarning, match="no trace: the run ended after step 3"), profiler:
            train(profiler, range(1, 4))
        assert profiler.trace is None

    def test_resumed_behind_the_steps(self, tmp_path):
        profiler = StepProfiler(tmp_path, first_step=5, last_step=6, initial_step=100)
        with pytest.warns(UserWarning, match="had started after step 5"), profiler:
            train(profiler, [101])

    def test_resumed_at_the_first_step(self, tmp_path):
        with StepProfiler(tmp_path, first_step=101, last_step=101, initial_step=100) as profiler:
            train(profiler, [101, 102])
        assert bodies(profiler.trace) == [101]

    def test_other_ranks_record_nothing(self, tmp_path):
        with StepProfiler(tmp_path, first_step=1, last_step=1, ranks=(1,)) as profiler:
            train(profiler, [1])
        assert profiler.trace is None
        assert list(tmp_path.iterdir()) == []

    def test_steps(self, tmp_path):
        with pytest.raises(ValueError, match="first_step=3, last_step=2"):
            StepProfiler(tmp_path, first_step=3, last_step=2)
        profiler = StepProfiler(tmp_path, first_step=50, last_step=50)
        profiler.end_step(1)
        with pytest.raises(ValueError, match="got 1 after 1"):
            profiler.end_step(1)


def slow_forward(folder, slow_rank):
    rank = torch.distributed.get_rank()
    model = fs.shard_model(tiny_model("llama").to(device_here()), mesh=mesh_here())
    if rank == slow_rank:
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: time.sleep(SLOW))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = ragged_batches(8, seed=rank)
    with StepProfiler(folder, first_step=2, last_step=3, ranks=None) as profiler:
        for step, window in enumerate(fs.windows(loader, 2), start=1):
            fs.train_step(model, window, optimizer)
            profiler.end_step(step)
    spread = aggregate_metrics(fs.trace_seconds(profiler.trace), reduce="spread")
    return fs.trace_seconds(profiler.trace), spread


@pytest.mark.accelerator
def test_a_trace_shows_the_rank_that_is_slow(tmp_path):
    """Its middle block is slow, so that forward and backward take the same time on both ranks."""
    slept = 4 * SLOW  # once a micro-batch
    for rank, (seconds, spread) in enumerate(run_distributed(slow_forward, 2, tmp_path, 1)):
        parts = {"next_batches", "wait_for_ranks", "forward", "backward", "clip_gradients", "optimizer"}
        if asked() != "cpu":  # such a device leaves no kernels in a trace, and the host's waits say nothing
            assert seconds.keys() == parts
            continue
        assert seconds.keys() == parts | {"collectives", "computing"}
        assert spread["computing_max_rank"] == 1
        assert spread["computing_max"] > slept
        assert spread["computing_max"] > spread["computing_min"] + slept / 2
        assert seconds["forward"] > slept
        assert (seconds["collectives"] > slept / 2) or rank == 1


def test_a_trace_of_a_gpu(tmp_path):
    """NCCL's kernels wait for the other ranks; spans of the host say only when work was queued."""
    spans = [
        ("user_annotation", "fsdp_sft.forward", 1000),
        ("user_annotation", "fsdp_sft.backward", 2000),
        ("gpu_user_annotation", "fsdp_sft.forward", 90_000),
        ("user_annotation", "FSDP::pre_forward (model.layers.0)", 100),
        ("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 30_000),
        ("kernel", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", 50_000),
        ("gpu_memcpy", "Memcpy DtoH", 7000),
    ]
    events = [{"ph": "X", "cat": cat, "name": name, "dur": dur, "ts": 0} for cat, name, dur in spans]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}))
    expected = {"forward": 0.001, "backward": 0.002, "collectives": 0.03, "computing": 0.05}
    assert fs.trace_seconds(path) == pytest.approx(expected)


def test_a_file_that_is_no_trace(tmp_path):
    path = tmp_path / "trace.json"
    for text in ("", "[]", "{}", "no JSON"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no trace of torch's profiler"):
            fs.trace_seconds(path)
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="no step of train_step"):
        fs.trace_seconds(path)
    with pytest.raises(FileNotFoundError):
        fs.trace_seconds(tmp_path / "missing.json")

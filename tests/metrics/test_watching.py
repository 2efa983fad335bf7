"""Sinks, aggregation over ranks, waiting for data and the picture of a run."""

import json
import math
import struct
import sys
import time
import types
import warnings
import zlib

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft.metrics.log import MetricLogger, aggregate_metrics
from fsdp_sft.metrics.plot import plot_run
from fsdp_sft.metrics.throughput import ThroughputMeter
from tests.harness.places import ROOT
from tests.harness.ranks import run_distributed


class TestSinks:
    def test_a_sink_is_called_with_plain_scalars(self, tmp_path):
        rows = []
        with MetricLogger(
            jsonl=tmp_path / "m.jsonl", stdout=False, sinks=[lambda row, step: rows.append((step, row))]
        ) as logger:
            logger.log({"loss": torch.tensor(0.5), "mfu": None}, 3)
        assert rows == [(3, {"loss": 0.5, "mfu": None})]
        assert type(rows[0][1]["loss"]) is float
        assert json.loads((tmp_path / "m.jsonl").read_text())["loss"] == 0.5

    def test_other_ranks_call_and_open_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr("fsdp_sft.metrics.log.this_rank", lambda: 1)
        rows = []
        with MetricLogger(
            jsonl=tmp_path / "m.jsonl",
            stdout=False,
            sinks=[lambda row, step: rows.append(step)],
        ) as logger:
            logger.log({"loss": 1.0}, 1)
        assert rows == []
        assert list(tmp_path.iterdir()) == []


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class SlowLoader:
    """Batches that take a given time each to arrive, by the clock of the test."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def __len__(self):
        return len(self.seconds)

    def __iter__(self):
        for index, seconds in enumerate(self.seconds):
            self.clock.now += seconds
            yield {"input_ids": torch.full((1, 4), index)}


def watched(meter, loader):
    return fs.windows(loader, 1, meter=meter)


class TestWaitingForData:
    def test_share(self):
        clock = Clock()
        meter = ThroughputMeter(world_size=1, device="cpu", clock=clock)
        for _ in watched(meter, SlowLoader(clock, [50.0, 1.0, 2.0])):
            clock.now += 3.0
            meter.update(num_tokens=8)
        assert meter.stats()["data_wait_share"] == (1 + 2) / (1 + 3 + 2 + 3)

    def test_unwatched_is_unknown(self):
        clock = Clock()
        meter = ThroughputMeter(world_size=1, device="cpu", clock=clock, warmup_steps=0)
        clock.now += 1.0
        meter.update(num_tokens=8)
        assert meter.stats()["data_wait_share"] is None

    def test_a_pause_is_neither_time_nor_waiting(self):
        clock = Clock()
        meter = ThroughputMeter(world_size=1, device="cpu", clock=clock, warmup_steps=0)
        with meter.paused():
            assert len(list(watched(meter, SlowLoader(clock, [1.0])))) == 1
        clock.now += 2.0
        meter.update(num_tokens=8)
        assert meter.stats()["data_wait_share"] == 0.0
        assert meter.stats()["step_seconds"] == 2.0

    def test_pauses_have_a_share_of_their_own(self):
        clock = Clock()
        meter = ThroughputMeter(world_size=1, device="cpu", clock=clock)
        for paused in (50.0, 1.0, 0.0):
            with meter.paused():
                clock.now += paused
            clock.now += 2.0
            meter.update(num_tokens=8)
        assert meter.stats()["paused_share"] == 1 / (2 + 2 + 1)
        assert meter.stats()["step_seconds"] == 2.0

    def test_the_last_step(self):
        clock = Clock()
        meter = ThroughputMeter(world_size=1, device="cpu", clock=clock)
        for seconds in (50.0, 1.0, 3.0):
            clock.now += seconds
            meter.update(num_tokens=8)
        assert meter.stats()["last_step_seconds"] == 3.0
        assert meter.stats()["step_seconds"] == 2.0


def wait_shares():
    """On two ranks: the shares of a rank whose loader is slow, and of one that waits for it."""
    loader = [{"input_ids": torch.ones(1, 4, dtype=torch.long)}] * 4

    def slow():
        for batch in loader:
            time.sleep(0.2)
            yield batch

    meter = ThroughputMeter(world_size=2, device="cpu")
    for window in watched(meter, slow() if torch.distributed.get_rank() else loader):
        meter.update(num_tokens=len(window))
    stats = meter.stats()
    return stats["data_wait_share"], stats["rank_wait_share"]


def test_waiting_for_another_ranks_data_is_seen():
    (data, ranks), (slow_data, slow_ranks) = run_distributed(wait_shares, 2)
    assert data < 0.2
    assert ranks > 0.8
    assert slow_data > 0.8
    assert slow_ranks < 0.2


def aggregate_on_rank():
    rank = torch.distributed.get_rank()
    metrics = {"memory": [30, 10, 20][rank], "wait": [None, 0.25, 0.75][rank], "nobody": None}
    metrics["bad"] = math.nan if rank == 1 else 1.0
    return {how: aggregate_metrics(metrics, reduce=how) for how in ("mean", "sum", "min", "max", "spread")}


def aggregate_unequal():
    rank = torch.distributed.get_rank()
    return aggregate_metrics({f"m{rank}": rank, "both": rank})


class TestAggregate:
    def test_over_ranks(self):
        results = run_distributed(aggregate_on_rank, 3)
        assert str(results[1]) == str(results[0]) == str(results[2])
        for how, memory, wait in (("mean", 20, 0.5), ("sum", 60, 1.0), ("min", 10, 0.25), ("max", 30, 0.75)):
            found = results[0][how]
            assert (found["memory"], found["wait"], found["nobody"]) == (memory, wait, None)
            assert math.isnan(found["bad"])
        spread = results[0]["spread"]
        assert [spread[f"memory_{x}"] for x in ("min", "mean", "max", "max_rank")] == [10, 20, 30, 0]
        assert spread["wait_max_rank"] == 2
        assert spread["nobody_max_rank"] is None
        assert spread["bad_max_rank"] == 1
        MetricLogger(stdout=False).log(spread, 1)

    def test_what_one_rank_alone_knows(self):
        for found in run_distributed(aggregate_unequal, 2):
            assert found == {"m0": 0, "both": 0.5, "m1": 1}

    def test_single_process(self):
        assert aggregate_metrics({"a": 3, "b": None}, reduce="max") == {"a": 3, "b": None}


def pixels(path):
    """Width, height and rows of RGB bytes of an 8-bit PNG, by the format's own rules."""
    data, position, body = path.read_bytes(), 8, b""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    while position < len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        chunk = data[position + 8 : position + 8 + length]
        if kind == b"IHDR":
            width, height = struct.unpack(">II", chunk[:8])
        elif kind == b"IDAT":
            body += chunk
        position += 12 + length
    return width, height, zlib.decompress(body)


def write_run(path, rows):
    with MetricLogger(jsonl=path, stdout=False) as logger:
        for step, row in rows:
            logger.log(row, step)


class TestPlotRun:
    @pytest.fixture(autouse=True)
    def _matplotlib(self):
        pytest.importorskip("matplotlib", reason="the picture needs the 'plot' extra")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of panels for which there is no room
            yield

    @pytest.fixture
    def lines(self, monkeypatch):
        """Titles and drawn points of each panel, read from matplotlib's own objects as they are saved."""
        from matplotlib.figure import Figure

        found = {}
        save = Figure.savefig

        def spy(figure, *args, **kwargs):
            save(figure, *args, **kwargs)
            for axes in figure.axes:
                title = axes.get_title(loc="left") or axes.get_ylabel()
                lines = [line for line in axes.lines if len(line.get_xdata())]
                curves = [(list(line.get_xdata()), list(line.get_ydata())) for line in lines]
                found[title] = (curves, [text.get_text() for text in axes.texts])

        monkeypatch.setattr(Figure, "savefig", spy)
        return found

    def test_four_panels(self, tmp_path, lines):
        rows = [
            (step, {"loss": 2.0 / step, "grad_norm": 1.0, "tokens_per_second": 100.0 * step, "mfu": step / 2})
            for step in (1, 2, 3)
        ]
        rows = [(step, {**row, "peak_allocated_bytes": step << 30}) for step, row in rows]
        write_run(tmp_path / "log.jsonl", [*rows, (3, {"eval_loss": 0.9})])
        out = plot_run(tmp_path / "log.jsonl", tmp_path / "pictures" / "run.png")
        assert out == tmp_path / "pictures" / "run.png"
        width, height, body = pixels(out)
        assert (width, height) == (1320, 840)
        assert len(set(body)) > 50
        assert lines["Loss"][0] == [([1, 2, 3], [2.0, 1.0, 2.0 / 3]), ([3], [0.9])]
        assert lines["Gradient norm"][0] == [([1, 2, 3], [1.0, 1.0, 1.0])]
        assert lines["Throughput"][0] == [([1, 2, 3], [100.0, 200.0, 300.0])]
        assert lines["MFU (dashed)"][0] == [([1, 2, 3], [0.5, 1.0, 1.5])]
        assert lines["Peak memory"][0] == [([1, 2, 3], [1.0, 2.0, 3.0])]

    def test_the_learning_rate_stands_beside_the_gradient_norm(self, tmp_path, lines):
        rows = [(step, {"loss": 1.0, "grad_norm": 2.0, "lr": step / 100}) for step in (1, 2, 3)]
        write_run(tmp_path / "m.jsonl", rows)
        plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")
        assert lines["learning rate (dashed)"][0] == [([1, 2, 3], [0.01, 0.02, 0.03])]

    def test_unknown_mfu_draws_no_axis_of_zeros(self, tmp_path, lines):
        write_run(tmp_path / "m.jsonl", [(1, {"loss": 1.0, "tokens_per_second": 5.0, "mfu": None})])
        plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")
        assert "MFU (dashed)" not in lines
        assert lines["Gradient norm"] == ([], ["not logged"])

    def test_resumed_run_and_broken_last_line(self, tmp_path, lines):
        path = tmp_path / "m.jsonl"
        write_run(path, [(1, {"loss": 3.0}), (2, {"loss": 9.0}), (2, {"loss": 2.0}), (3, {"loss": 1.0})])
        with path.open("a") as file:
            file.write('{"step": 4, "lo')
        plot_run(path, tmp_path / "m.png")
        assert lines["Loss"][0] == [([1, 2, 3], [3.0, 2.0, 1.0])]

    def test_values_that_are_not_finite_are_marked(self, tmp_path, lines):
        write_run(
            tmp_path / "m.jsonl", [(1, {"loss": 1.0}), (2, {"loss": math.nan}), (3, {"loss": math.inf})]
        )
        plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")
        curve, crosses = lines["Loss"][0]
        assert curve[1][0] == 1.0
        assert all(math.isnan(value) for value in curve[1][1:])
        assert crosses == ([2, 3], [0, 0])

    def test_a_long_run_has_a_median(self, tmp_path, lines):
        values = [1.0 if step % 10 else 50.0 for step in range(1, 401)]
        write_run(tmp_path / "m.jsonl", [(i + 1, {"loss": value}) for i, value in enumerate(values)])
        plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")
        raw, median = lines["Loss"][0]
        assert raw[1] == values
        assert set(median[1]) == {1.0}

    @pytest.mark.parametrize("steps", [1, 2, 5, 12, 300])
    def test_ticks_are_whole_steps_and_one_step_is_seen(self, tmp_path, monkeypatch, steps):
        figure = pytest.importorskip("matplotlib.figure")
        figures = []
        plain = figure.Figure.savefig
        monkeypatch.setattr(
            figure.Figure, "savefig", lambda self, *a, **k: (figures.append(self), plain(self, *a, **k))
        )
        rows = [(s, {"loss": 1 / s, "grad_norm": 1.0, "tokens_per_second": 9.0}) for s in range(1, steps + 1)]
        write_run(tmp_path / "m.jsonl", rows)
        plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")
        for axes in figures[0].axes[:3]:
            ticks = axes.get_xticks()
            assert all(tick == int(tick) for tick in ticks)
            assert any(1 <= tick <= steps for tick in ticks)
            assert axes.lines[0].get_marker() == ("o" if steps == 1 else "None")

    def test_no_steps(self, tmp_path):
        (tmp_path / "m.jsonl").write_text('{"loss": 1}\n')
        with pytest.raises(ValueError, match="no line with a step"):
            plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")

    def test_no_backend_is_chosen_for_the_process(self, tmp_path):
        import matplotlib

        before = dict.copy(matplotlib.rcParams)["backend"]
        write_run(tmp_path / "m.jsonl", [(1, {"loss": 1.0})])
        plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")
        assert dict.copy(matplotlib.rcParams)["backend"] == before


class Tracker(types.ModuleType):
    """A module in the place of wandb, trackio or tensorboard, which keeps what it is given."""

    def __init__(self, name):
        super().__init__(name)
        self.rows = []

    def init(self, **options):
        return self

    def log(self, metrics, step):
        self.rows.append((step, metrics))

    def SummaryWriter(self, folder):
        return self

    def add_scalar(self, name, value, step):
        self.rows.append((step, {name: value}))


@pytest.mark.parametrize("name", ["wandb", "trackio", "torch.utils.tensorboard"])
def test_the_pages_lines_for_a_tracker_log_to_it(name, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "how-to" / "watch-a-run.md").read_text(encoding="utf-8")
    section = page.partition("## Weights and Biases")[2].partition("```text\n")[2].partition("```")[0]
    (lines,) = [part for part in section.split("\n\n") if part.startswith((f"import {name}", f"from {name}"))]
    tracker = Tracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    monkeypatch.chdir(tmp_path)
    scope = {"fs": fs, "context": types.SimpleNamespace(is_main=True)}
    exec(lines, scope)
    with scope["logger"] as logger:
        logger.log({"loss": 0.5, "mfu": None}, 3)
    assert tracker.rows == [(3, {"loss": 0.5})]

"""Trackers, the progress bar, aggregation over ranks, waiting for data, traces and the picture of a run."""

import io
import json
import math
import struct
import sys
import time
import types
import warnings
import zlib
from types import ModuleType

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft.metrics import (
    MetricLogger,
    MetricSink,
    ProgressBar,
    TensorBoardSink,
    ThroughputMeter,
    TrackioSink,
    WandbSink,
    aggregate_metrics,
    plot_run,
    progress,
)
from tests.harness.ranks import run_distributed


class Recorder:
    def __init__(self):
        self.rows, self.closed = [], 0

    def log(self, metrics, step):
        self.rows.append((step, dict(metrics)))

    def close(self):
        self.closed += 1


class TestSinks:
    def test_every_sink_gets_plain_scalars(self, tmp_path):
        mine = Recorder()
        with MetricLogger(jsonl=tmp_path / "m.jsonl", stdout=False, sinks=[mine]) as logger:
            logger.log({"loss": torch.tensor(0.5), "mfu": None}, 3)
        assert mine.rows == [(3, {"loss": 0.5, "mfu": None})]
        assert type(mine.rows[0][1]["loss"]) is float
        assert mine.closed == 1
        assert json.loads((tmp_path / "m.jsonl").read_text())["loss"] == 0.5

    def test_other_ranks_open_nothing(self):
        mine = Recorder()
        with MetricLogger(stdout=False, sinks=[mine], is_main=False) as logger:
            logger.log({"loss": 1.0}, 1)
        assert mine.rows == []

    def test_something_else_is_refused(self):
        with pytest.raises(TypeError, match=r"log\(metrics, step\) and close\(\), got str"):
            MetricLogger(sinks=["tensorboard"])

    def test_the_protocol(self, tmp_path, monkeypatch):
        for name in ("tensorboard", "wandb", "trackio"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for sink in (TensorBoardSink(tmp_path), WandbSink({}), TrackioSink({}), ProgressBar(total_steps=1)):
            assert isinstance(sink, MetricSink)
            sink.close()  # never opened
        assert list(tmp_path.iterdir()) == []


class TestTensorBoard:
    def test_read_back(self, tmp_path):
        pytest.importorskip("tensorboard")
        reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        with MetricLogger(stdout=False, sinks=[TensorBoardSink(tmp_path / "run")]) as logger:
            logger.log({"loss": 2.5, "mfu": None, "phase": "train", "ok": True}, 1)
            logger.log({"loss": 1.5, "mfu": None}, 2)
        events = reader.EventAccumulator(str(tmp_path / "run"))
        events.Reload()
        assert events.Tags()["scalars"] == ["loss", "ok"]  # an unknown MFU is a gap, never 0
        assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 1.5)]
        assert events.Tags()["tensors"] == ["phase/text_summary"]

    def test_absent(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        with pytest.raises(ImportError, match="pip install tensorboard"):
            TensorBoardSink(tmp_path)


class TestWandbAndTrackio:
    @pytest.mark.parametrize(("sink", "name"), [(WandbSink, "wandb"), (TrackioSink, "trackio")])
    def test_one_run_started_at_the_first_log(self, sink, name, monkeypatch):
        calls = []
        run = types.SimpleNamespace(
            log=lambda row, step: calls.append((step, row)), finish=lambda: calls.append("finish")
        )
        module = types.SimpleNamespace(init=lambda **options: calls.append(options) or run)
        monkeypatch.setitem(sys.modules, name, module)
        one = sink({"project": "sft"})
        assert calls == []
        with MetricLogger(stdout=False, sinks=[one]) as logger:
            logger.log({"loss": 1.0, "mfu": None}, 1)
            logger.log({"loss": 0.5}, 2)
        assert calls == [{"project": "sft"}, (1, {"loss": 1.0}), (2, {"loss": 0.5}), "finish"]

    @pytest.mark.parametrize("init", [{}, {"project": "other"}])
    @pytest.mark.parametrize(("sink", "name"), [(WandbSink, "wandb"), (TrackioSink, "trackio")])
    def test_a_run_of_the_program_is_left_open(self, sink, name, init, monkeypatch):
        calls = []
        run = types.SimpleNamespace(
            log=lambda row, step: calls.append((step, row)), finish=lambda: calls.append("finish")
        )
        current = types.SimpleNamespace(current_run=types.SimpleNamespace(get=lambda: run))
        module = types.SimpleNamespace(
            init=lambda **options: calls.append(options) or run, run=run, context_vars=current
        )
        monkeypatch.setitem(sys.modules, name, module)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in (1, 2):
                with MetricLogger(stdout=False, sinks=[sink(init)]) as logger:
                    logger.log({"loss": 1.0}, step)
        assert calls == [(1, {"loss": 1.0}), (2, {"loss": 1.0})]
        assert [str(w.message)[:10] for w in caught] == ["a run of " + name[0]] * 2 * bool(init)

    @pytest.mark.parametrize(("sink", "name"), [(WandbSink, "wandb"), (TrackioSink, "trackio")])
    def test_absent(self, sink, name, monkeypatch):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=f"pip install {name}"):
            sink({})

    def test_the_project_alone_is_refused(self):
        with pytest.raises(
            TypeError, match=r"arguments of wandb\.init, such as \{'project': 'sft'\}; got str"
        ):
            WandbSink("sft")

    def test_real_wandb_offline(self, tmp_path, monkeypatch):
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_SILENT", "true")
        with MetricLogger(
            stdout=False, sinks=[WandbSink({"project": "sft", "mode": "offline", "dir": str(tmp_path)})]
        ) as logger:
            logger.log({"loss": 2.5, "mfu": None, "bad": math.nan}, 1)
            logger.log({"loss": 1.5}, 2)
        (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        content = record.read_bytes()
        assert b"loss" in content
        assert b"mfu" not in content

    def test_real_trackio(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when trackio is imported
        pytest.importorskip("trackio")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        import sqlite3

        with MetricLogger(stdout=False, sinks=[TrackioSink({"project": "sft", "embed": False})]) as logger:
            logger.log({"loss": 2.5, "mfu": None, "bad": math.nan}, 1)
            logger.log({"loss": 1.5}, 2)
        (base,) = tmp_path.glob("**/*.db")
        rows = sqlite3.connect(base).execute("select step, metrics from metrics order by step").fetchall()
        assert [(step, json.loads(text)["loss"]) for step, text in rows] == [(1, 2.5), (2, 1.5)]
        assert "mfu" not in json.loads(rows[0][1])


class TestProgressBar:
    def shown(self, rows, **options):
        stream = io.StringIO()
        with MetricLogger(stdout=False, sinks=[ProgressBar(stream=stream, **options)]) as logger:
            for step, row in rows:
                logger.log(row, step)
        return stream.getvalue().replace("\r", "\n").splitlines()[-1].rstrip()

    def test_what_it_shows(self):
        row = {"loss": 0.07471, "tokens_per_second": 12345.0, "mfu": 0.4123, "data_wait_share": 0.01}
        last = self.shown(
            [(4, {**row, "peak_reserved_bytes": 33 << 30, "num_alloc_retries": 0})], total_steps=8
        )
        assert "4/8" in last
        assert last.endswith("loss 0.0747, 12.3k tok/s, MFU 41.2%, 33.0 GiB]")

    def test_unknown_mfu_is_not_shown_as_zero(self):
        last = self.shown([(1, {"loss": 1.0, "tokens_per_second": None, "mfu": None})], total_steps=2)
        assert last.endswith("loss 1.0000]")

    def test_what_should_worry(self):
        row = {"loss": 1.0, "data_wait_share": 0.34, "rank_wait_share": 0.2, "num_alloc_retries": 3}
        assert self.shown([(1, row)], total_steps=2).endswith(
            "data wait 34%, rank wait 20%, 3 allocator retries]"
        )

    def test_resume_and_evaluation(self):
        rows = [(101, {"loss": 1.0}), (101, {"eval_loss": 0.5})]
        assert "101/200" in self.shown(rows, total_steps=200, initial_step=100)

    def test_megatokens(self):
        assert "2.50M tok/s" in progress.bar_text({"tokens_per_second": 2.5e6})
        assert "12 tok/s" in progress.bar_text({"tokens_per_second": 12.3})

    @pytest.mark.parametrize("options", [{"total_steps": 0}, {"total_steps": 1, "initial_step": -1}])
    def test_arguments(self, options):
        with pytest.raises(ValueError, match="must be >="):
            ProgressBar(**options)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class SlowLoader:
    """Batches that take a given time each to arrive, by the clock of the test."""

    sampler = "the loader's sampler"

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def __len__(self):
        return len(self.seconds)

    def __iter__(self):
        for index, seconds in enumerate(self.seconds):
            self.clock.now += seconds
            yield index


class TestWaitingForData:
    def test_share(self):
        clock = Clock()
        meter = ThroughputMeter(world_size=1, device="cpu", clock=clock)
        for _ in meter.watch(SlowLoader(clock, [50.0, 1.0, 2.0])):
            clock.now += 3.0
            meter.update(num_tokens=8)
        assert meter.stats()["data_wait_share"] == (1 + 2) / (1 + 3 + 2 + 3)

    def test_unwatched_is_unknown(self):
        clock = Clock()
        meter = ThroughputMeter(world_size=1, device="cpu", clock=clock, warmup_steps=0)
        clock.now += 1.0
        meter.update(num_tokens=8)
        assert meter.stats()["data_wait_share"] is None

    def test_the_result_stands_in_for_the_loader(self):
        loader = SlowLoader(Clock(), [1.0, 1.0])
        watched = ThroughputMeter(world_size=1, device="cpu").watch(loader)
        assert len(watched) == 2
        assert watched.sampler == "the loader's sampler"
        assert [list(watched), list(watched)] == [[0, 1], [0, 1]]

    def test_a_pause_is_neither_time_nor_waiting(self):
        clock = Clock()
        meter = ThroughputMeter(world_size=1, device="cpu", clock=clock, warmup_steps=0)
        watched = meter.watch(SlowLoader(clock, [1.0]))
        with meter.paused():
            list(watched)
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

    def test_an_error_of_the_loader_comes_through(self):
        def broken():
            yield 1
            raise OSError("disk")

        watched = iter(ThroughputMeter(world_size=1, device="cpu").watch(broken()))
        assert next(watched) == 1
        with pytest.raises(OSError, match="disk"):
            next(watched)


def wait_shares():
    """On two ranks: the shares of a rank whose loader is slow, and of one that waits for it."""
    loader = [{"input_ids": torch.ones(1, 4, dtype=torch.long)}] * 4

    def slow():
        for batch in loader:
            time.sleep(0.2)
            yield batch

    meter = ThroughputMeter(world_size=2, device="cpu")
    batches = meter.watch(slow() if torch.distributed.get_rank() else loader)
    for window in fs.windows(batches, 1, count_fn=lambda batch: 1):
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
    found = []
    for metrics in ({f"m{rank}": 1}, {"m": 1 if rank else "text"}):
        try:
            aggregate_metrics(metrics)
        except (ValueError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


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

    def test_every_rank_raises(self):
        for found in run_distributed(aggregate_unequal, 2):
            assert found == [
                "ValueError: rank 1 has metrics ['m1'], rank 0 has ['m0']",
                "TypeError: rank 0: metric 'm' must be a float, int or None, got str",
            ]

    def test_single_process(self):
        assert aggregate_metrics({"a": 3, "b": None}, reduce="max") == {"a": 3, "b": None}

    def test_unknown_reduction(self):
        with pytest.raises(ValueError, match="got 'median'"):
            aggregate_metrics({}, reduce="median")


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
                curves = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
                found[title] = (curves, [text.get_text() for text in axes.texts])
                for scale in axes.child_axes:
                    found[scale.get_ylabel()] = scale.get_ylim()[1] / axes.get_ylim()[1]

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
        assert lines["MFU (%)"] == pytest.approx(0.5)  # percent for a token per second
        assert lines["Peak memory (allocated)"][0] == [([1, 2, 3], [1.0, 2.0, 3.0])]

    def test_the_learning_rate_stands_beside_the_gradient_norm(self, tmp_path, lines):
        rows = [(step, {"loss": 1.0, "grad_norm": 2.0, "lr": step / 100}) for step in (1, 2, 3)]
        write_run(tmp_path / "m.jsonl", rows)
        plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")
        assert lines["learning rate (dashed)"][0] == [([1, 2, 3], [0.01, 0.02, 0.03])]

    def test_unknown_mfu_draws_no_axis_of_zeros(self, tmp_path, lines):
        write_run(tmp_path / "m.jsonl", [(1, {"loss": 1.0, "tokens_per_second": 5.0, "mfu": None})])
        plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")
        assert "MFU (%)" not in lines
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
        assert lines["Loss"][0] == [([1], [1.0]), ([2, 3], [0, 0])]

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


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")

"""Waiting for other ranks' data, aggregation over ranks and the picture of a run."""

import math
import time
import warnings

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft.metrics.log import MetricLogger, aggregate_metrics
from fsdp_sft.metrics.plot import plot_run
from fsdp_sft.metrics.throughput import ThroughputMeter
from tests.harness.ranks import run_distributed


def wait_shares():
    """On two ranks: the shares of a rank whose loader is slow, and of one that waits for it."""
    loader = [{"input_ids": torch.ones(1, 4, dtype=torch.long)}] * 4

    def slow():
        for batch in loader:
            time.sleep(0.2)
            yield batch

    meter = ThroughputMeter(world_size=2, device="cpu")
    for window in fs.windows(slow() if torch.distributed.get_rank() else loader, 1, meter=meter):
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
    metrics |= {"bad": math.nan if rank == 1 else 1.0, f"of rank {rank}": rank}
    return {how: aggregate_metrics(metrics, reduce=how) for how in ("mean", "sum", "min", "max", "spread")}


class TestAggregate:
    def test_over_ranks(self):
        results = run_distributed(aggregate_on_rank, 3)
        assert str(results[1]) == str(results[0]) == str(results[2])
        for how, memory, wait in (("mean", 20, 0.5), ("sum", 60, 1.0), ("min", 10, 0.25), ("max", 30, 0.75)):
            found = results[0][how]
            assert (found["memory"], found["wait"], found["nobody"]) == (memory, wait, None)
            assert math.isnan(found["bad"])
            assert [found[f"of rank {rank}"] for rank in range(3)] == [0, 1, 2], "known to one rank alone"
        spread = results[0]["spread"]
        assert [spread[f"memory_{x}"] for x in ("min", "mean", "max", "max_rank")] == [10, 20, 30, 0]
        assert spread["wait_max_rank"] == 2
        assert spread["nobody_max_rank"] is None
        assert spread["bad_max_rank"] == 1
        MetricLogger(stdout=False).log(spread, 1)

    def test_single_process(self):
        assert aggregate_metrics({"a": 3, "b": None}, reduce="max") == {"a": 3, "b": None}


def curves(axes):
    """What is drawn into a panel: (steps, values) of each line."""
    lines = [line for line in axes.lines if len(line.get_xdata())]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in lines]


class TestPlotRun:
    @pytest.fixture(autouse=True)
    def _matplotlib(self):
        pytest.importorskip("matplotlib", reason="the picture needs the 'plot' extra")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of panels for which there is no room
            yield

    @pytest.fixture
    def drawn(self, tmp_path, monkeypatch):
        """Draws rows, or a file, and returns matplotlib's panels by title."""
        from matplotlib.figure import Figure

        figures, save = [], Figure.savefig
        monkeypatch.setattr(
            Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))
        )

        def draw(rows):
            with MetricLogger(jsonl=tmp_path / "m.jsonl", stdout=False) as logger:
                for step, row in rows:
                    logger.log(row, step)
            plot_run(tmp_path / "m.jsonl", tmp_path / "pictures" / "m.png")
            return {axes.get_title(loc="left") or axes.get_ylabel(): axes for axes in figures[-1].axes}

        return draw

    def test_four_panels_and_an_axis_beside_two(self, tmp_path, drawn):
        from matplotlib import image

        steps = (1, 2, 3)
        rows = [(n, {"loss": 2.0 / n, "grad_norm": 1.0, "lr": n / 100, "mfu": n / 2}) for n in steps]
        rows = [
            (n, {**row, "tokens_per_second": 100.0 * n, "peak_allocated_bytes": n << 30}) for n, row in rows
        ]
        panels = drawn([*rows, (3, {"eval_loss": 0.9})])
        picture = image.imread(tmp_path / "pictures" / "m.png")
        assert picture.shape[:2] == (840, 1320)
        assert len(set(picture.flatten().tolist())) > 50
        assert curves(panels["Loss"]) == [([1, 2, 3], [2.0, 1.0, 2.0 / 3]), ([3], [0.9])]
        assert curves(panels["Gradient norm"]) == [([1, 2, 3], [1.0, 1.0, 1.0])]
        assert curves(panels["learning rate (dashed)"]) == [([1, 2, 3], [0.01, 0.02, 0.03])]
        assert curves(panels["Throughput"]) == [([1, 2, 3], [100.0, 200.0, 300.0])]
        assert curves(panels["MFU (dashed)"]) == [([1, 2, 3], [0.5, 1.0, 1.5])]
        assert curves(panels["Peak memory"]) == [([1, 2, 3], [1.0, 2.0, 3.0])]

    def test_unknown_mfu_draws_no_axis_of_zeros(self, drawn):
        panels = drawn([(1, {"loss": 1.0, "tokens_per_second": 5.0, "mfu": None})])
        assert "MFU (dashed)" not in panels
        assert [text.get_text() for text in panels["Gradient norm"].texts] == ["not logged"]

    def test_resumed_run_and_broken_line(self, tmp_path, drawn):
        (tmp_path / "m.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo\n')
        panels = drawn([(2, {"loss": 9.0}), (2, {"loss": 2.0}), (3, {"loss": 1.0})])
        assert curves(panels["Loss"]) == [([1, 2, 3], [3.0, 2.0, 1.0])]

    def test_values_that_are_not_finite_are_marked(self, drawn):
        curve, crosses = curves(
            drawn([(1, {"loss": 1.0}), (2, {"loss": math.nan}), (3, {"loss": math.inf})])["Loss"]
        )
        assert curve[1][0] == 1.0
        assert all(math.isnan(value) for value in curve[1][1:])
        assert crosses == ([2, 3], [0, 0])

    def test_a_long_run_has_a_median(self, drawn):
        values = [1.0 if step % 10 else 50.0 for step in range(1, 401)]
        raw, median = curves(drawn([(i + 1, {"loss": value}) for i, value in enumerate(values)])["Loss"])
        assert raw[1] == values
        assert set(median[1]) == {1.0}

    @pytest.mark.parametrize("steps", [1, 2, 5, 12, 300])
    def test_ticks_are_whole_steps_and_one_step_is_seen(self, drawn, steps):
        panels = drawn([(n, {"loss": 1 / n, "grad_norm": 1.0}) for n in range(1, steps + 1)])
        for axes in (panels["Loss"], panels["Gradient norm"]):
            ticks = axes.get_xticks()
            assert all(tick == int(tick) for tick in ticks)
            assert any(1 <= tick <= steps for tick in ticks)
            assert axes.lines[0].get_marker() == ("o" if steps == 1 else "None")

    def test_no_steps(self, tmp_path):
        (tmp_path / "m.jsonl").write_text('{"loss": 1}\n')
        with pytest.raises(ValueError, match="no line with a step"):
            plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")

    def test_no_backend_is_chosen_for_the_process(self, drawn):
        import matplotlib

        before = dict.copy(matplotlib.rcParams)["backend"]
        drawn([(1, {"loss": 1.0})])
        assert dict.copy(matplotlib.rcParams)["backend"] == before

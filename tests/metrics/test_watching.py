"""What a run reports: its log, waiting for other ranks' data, aggregation over ranks, the picture."""

import json
import math
import time
import warnings
from types import SimpleNamespace

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft.metrics.log import MetricLogger, aggregate_metrics
from fsdp_sft.metrics.plot import plot_run
from fsdp_sft.metrics.throughput import ThroughputMeter
from tests.harness.ranks import run_distributed


def strict_lines(path):
    def refuse(constant):
        raise ValueError(f"{constant} is not strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


REFUSED = {
    **{
        f"a value that is {value!r:.20}": ({"grad_norm": value}, TypeError, "'grad_norm' must be a float")
        for value in ([1.0], torch.ones(1), torch.ones(2, 2), object, 1j, torch.tensor(1j))
    },
    "a shard": (
        {"grad_norm": SimpleNamespace(full_tensor=None)},
        TypeError,
        r"'grad_norm' is a DTensor; call \.full_tensor\(\)",
    ),
    "a step": ({"step": 1}, ValueError, "'step' is taken"),
    "a time": ({"time": 1}, ValueError, "'time' is taken"),
}


class TestMetricLogger:
    def test_jsonl(self, tmp_path):
        path = tmp_path / "runs" / "a" / "metrics.jsonl"
        with MetricLogger(jsonl=path, stdout=False) as logger:
            logger.log(
                {"loss": torch.tensor(2.5, dtype=torch.bfloat16), "n": torch.tensor(3), "mfu": None}, 1
            )
            # Flushed per line: readable before the file is closed.
            (first,) = strict_lines(path)
            assert time.time() - 60 < first.pop("time") <= time.time()
            assert first == {"step": 1, "loss": 2.5, "n": 3, "mfu": None}
            logger.log({"phase": "eval\nα", "skipped": True}, step=2)
            logger.log({"a": math.nan, "b": math.inf, "c": torch.tensor(-math.inf)}, 3)
        _, second, third = strict_lines(path)
        assert {**second, "time": 0} == {"step": 2, "time": 0, "phase": "eval\nα", "skipped": True}
        assert {**third, "time": 0} == {"step": 3, "time": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}

    @pytest.mark.parametrize(
        ("left", "steps"),
        [
            ('{"step": 1}\n', [1, 2]),
            ('{"step": 1}\n{"step": 2, "lo', [1, 2]),
            ("", [2]),
        ],
    )
    def test_resuming_appends(self, tmp_path, left, steps):
        path = tmp_path / "m.jsonl"
        path.write_text(left)
        with MetricLogger(jsonl=path, stdout=False) as logger:
            logger.log({}, 2)
        assert [row["step"] for row in strict_lines(path)] == steps

    def test_readable_line(self, capsys):
        logger = MetricLogger()
        row = {
            "loss": 2.345678,
            "lr": 0.01,
            "tokens_per_second": 12345.678,
            "mfu": None,
            "n": 123456,
            "tiny": 1e-7,
        }
        logger.log({**row, "ok": True, "bad": math.nan}, 7)
        logger.log({**row, "ok": False, "bad": math.inf, "loss": 12.5}, 1234)
        first, second = capsys.readouterr().out.splitlines()
        assert first == (
            "step      7 | loss    2.3457 | lr  1.00e-02 | tokens_per_second   12345.7 | mfu         - "
            "| n    123456 | tiny  1.00e-07 | ok      True | bad       nan"
        )
        assert len(first) == len(second)

    def test_a_sink_is_called_with_plain_scalars(self, tmp_path):
        rows, path = [], tmp_path / "m.jsonl"
        sinks = [lambda row, step: rows.append((step, row))]
        with MetricLogger(jsonl=path, stdout=False, sinks=sinks) as logger:
            logger.log({"loss": torch.tensor(0.5), "mfu": None}, 3)
        assert rows == [(3, {"loss": 0.5, "mfu": None})]
        assert type(rows[0][1]["loss"]) is float

    def test_other_ranks_write_and_call_nothing(self, tmp_path, monkeypatch, capsys):
        rows, path = [], tmp_path / "runs" / "m.jsonl"
        logger = MetricLogger(jsonl=path, sinks=[lambda row, step: rows.append(step)])
        # The rank is asked for at the first log, after the process group came up.
        monkeypatch.setattr("fsdp_sft.metrics.log.this_rank", lambda: 1)
        logger.log({"loss": 1.0}, 1)
        assert not path.parent.exists()
        assert (rows, capsys.readouterr().out) == ([], "")

    @pytest.mark.parametrize("what", REFUSED)
    @pytest.mark.parametrize("rank", [0, 1])
    def test_what_cannot_be_logged_is_refused_on_all_ranks(self, what, rank, monkeypatch):
        monkeypatch.setattr("fsdp_sft.metrics.log.this_rank", lambda: rank)
        metrics, error, message = REFUSED[what]
        with pytest.raises(error, match=message):
            MetricLogger().log(metrics, 1)


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

    def test_no_steps(self, tmp_path):
        (tmp_path / "m.jsonl").write_text('{"loss": 1}\n')
        with pytest.raises(ValueError, match="no line with a step"):
            plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")

import json
import math
import re
import time
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

import fsdp_sft as fs
from fsdp_sft import (
    MetricLogger,
    ThroughputMeter,
    aggregate_metrics,
    memory_stats,
    model_flops_per_token,
    peak_flops_per_second,
    plot_run,
    reset_peak_memory,
)
from fsdp_sft._process.gpus import known_device
from fsdp_sft.metrics import memory
from tests.harness.ranks import run_distributed

BATCH, SEQ = 2, 32
SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {**SMALL, "num_key_value_heads": 2}
SMALL_MOE = {
    **GQA,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "num_dense_layers": 1,
}
MOE = {**GQA, "num_experts_per_tok": 2, "experts_implementation": "eager"}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama-gqa-tied": lambda: transformers.LlamaConfig(**GQA, tie_word_embeddings=True),
    "llama-wide-heads": lambda: transformers.LlamaConfig(**GQA, head_dim=32),
    "qwen2": lambda: transformers.Qwen2Config(**GQA),
    "qwen3": lambda: transformers.Qwen3Config(**GQA, head_dim=24),
    "gemma3-text": lambda: transformers.Gemma3TextConfig(**GQA, head_dim=24, sliding_window=SEQ),
    "mixtral": lambda: transformers.MixtralConfig(**MOE, num_local_experts=8),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **MOE,
        num_experts=8,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        mlp_only_layers=[1],
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **MOE, num_experts=8, moe_intermediate_size=48, head_dim=16, decoder_sparse_step=2
    ),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **MOE,
        n_routed_experts=8,
        n_shared_experts=2,
        moe_intermediate_size=48,
        head_dim=16,
        first_k_dense_replace=2,
    ),
    "granite-moe-shared": lambda: transformers.GraniteMoeSharedConfig(
        **MOE, num_local_experts=8, shared_intermediate_size=96
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(**MOE, num_local_experts=8, head_dim=16, sliding_window=SEQ),
    "nemotron": lambda: transformers.NemotronConfig(**GQA),
    "stablelm": lambda: transformers.StableLmConfig(**GQA),
    "bloom": lambda: transformers.BloomConfig(vocab_size=160, hidden_size=64, n_layer=3, n_head=4),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=160, n_embd=64, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "gpt2-inner": lambda: transformers.GPT2Config(
        vocab_size=160, n_embd=64, n_layer=4, n_head=4, n_inner=96, bos_token_id=1, eos_token_id=2
    ),
    "phi": lambda: transformers.PhiConfig(**GQA),
    "phi3": lambda: transformers.Phi3Config(**GQA, sliding_window=SEQ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SMALL),
}


def measured_flops_per_token(config):
    # The counter has no formula for scaled_dot_product_attention on a CPU.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    input_ids = torch.randint(3, 160, (BATCH, SEQ))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=input_ids, use_cache=False)
    return counter.get_total_flops() / (BATCH * SEQ) * 3  # a backward takes twice as many


class TestModelFlops:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_agrees_with_flop_counter(self, family):
        config = FAMILIES[family]()
        assert model_flops_per_token(config, SEQ) == pytest.approx(measured_flops_per_token(config), rel=0.02)

    def test_llama_2_7b_by_hand(self):
        config = transformers.LlamaConfig()
        blocks = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
        assert model_flops_per_token(config, 4096) == 6 * (blocks + 32000 * 4096) + 12 * 32 * 4096 * 4096

    def test_sliding_window_shortens_the_context(self):
        layers = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
        config = transformers.Gemma3TextConfig(**GQA, head_dim=24, sliding_window=8, layer_types=layers)
        assert model_flops_per_token(config, 32) - model_flops_per_token(config, 16) == 12 * 4 * 24 * 2 * 16

    def test_unused_window_is_ignored(self):
        config = transformers.Qwen2Config(**GQA, sliding_window=8, use_sliding_window=False)
        assert model_flops_per_token(config, 32) > model_flops_per_token(config, 8)

    def test_composite_config_counts_its_text_decoder(self):
        text = FAMILIES["gemma3-text"]()
        config = transformers.Gemma3Config(text_config=text.to_dict())
        assert model_flops_per_token(config, SEQ) == model_flops_per_token(text, SEQ)
        # A decoder that is in its composite alone.
        assert model_flops_per_token(
            transformers.Qwen3VLConfig(text_config={**GQA, "head_dim": 24}), SEQ
        ) == model_flops_per_token(transformers.Qwen3Config(**GQA, head_dim=24), SEQ)

    @pytest.mark.parametrize(
        ("config", "scans"),
        [
            (lambda: transformers.AfmoeConfig(**SMALL_MOE), []),
            (
                lambda: transformers.FalconConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4),
                [],
            ),
            (lambda: transformers.Gemma4UnifiedTextConfig(num_hidden_layers=6, hidden_size=64), []),
            (
                lambda: transformers.MambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=8),
                ["MambaMixer", "the elementwise recurrence"],
            ),
        ],
    )
    def test_any_family_is_counted_and_what_is_not_seen_is_said(self, config, scans, caplog):
        with caplog.at_level("INFO"):
            flops = model_flops_per_token(config(), SEQ)
        assert flops > 0
        assert type(flops) is int
        assert re.findall("MambaMixer|the elementwise recurrence", caplog.text) == scans

    def test_no_causal_language_model(self):
        with pytest.raises(ValueError, match="T5Config"):
            model_flops_per_token(transformers.T5Config(), SEQ)


class TestPeakFlops:
    def test_cpu_is_unknown(self):
        assert peak_flops_per_second("cpu") is None

    @pytest.mark.parametrize(
        ("name", "tflops"),
        [
            ("NVIDIA A100-SXM4-80GB", 312.0),
            ("NVIDIA A10G", 70.0),
            ("NVIDIA A10", 125.0),
            ("NVIDIA H100 80GB HBM3", 989.4),
            ("NVIDIA H100 PCIe", 756.5),
            ("NVIDIA H100 NVL", 835.5),
            ("NVIDIA H200", 989.4),
            ("NVIDIA H200 NVL", 835.5),
            ("NVIDIA GH200 480GB", 989.4),
            ("NVIDIA B200", 2250.0),
            ("NVIDIA GB200", 2500.0),
            ("NVIDIA L40S", 362.05),
            ("NVIDIA GeForce RTX 4090", 165.2),
            ("AMD Instinct MI300X", 1307.4),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
            ("NVIDIA GeForce RTX 4090 D", None),
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
            ("NVIDIA RTX A4000", None),
            ("Tesla V100-SXM2-16GB", None),
        ],
    )
    def test_names(self, name, tflops):
        known = known_device(name)
        assert (known and known.flops_per_second) == (None if tflops is None else tflops * 1e12)


class TestMemoryStats:
    def test_cpu_sees_an_allocation(self):
        before = memory_stats("cpu")
        assert set(before) == {"peak_resident_bytes", "resident_bytes"}
        held = torch.ones(128 << 20, dtype=torch.uint8)
        grown = memory_stats("cpu")["resident_bytes"] - before["resident_bytes"]
        assert grown == pytest.approx(held.nbytes, rel=0.015)  # tight enough to tell KiB from kB

    def test_without_proc(self, monkeypatch, tmp_path):
        expected = memory_stats("cpu")["peak_resident_bytes"]
        monkeypatch.setattr(memory, "_PROC_STATUS", tmp_path / "absent")
        monkeypatch.setattr(memory, "_PROC_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
        stats = memory_stats("cpu")
        assert set(stats) == {"peak_resident_bytes"}
        assert stats["peak_resident_bytes"] >= expected * 0.9
        assert reset_peak_memory("cpu") is False

    def test_reset(self):
        torch.ones(64 << 20, dtype=torch.uint8)  # and gone again
        before = memory_stats("cpu")
        if not reset_peak_memory("cpu"):
            pytest.skip("this system keeps one peak for the life of a process")
        assert memory_stats("cpu")["peak_resident_bytes"] < before["peak_resident_bytes"]

    def test_other_device(self):
        with pytest.raises(ValueError, match="meta"):
            memory_stats("meta")

    @pytest.mark.gpu
    def test_cuda(self):
        reset_peak_memory()
        base = memory_stats()["allocated_bytes"]
        torch.empty(32 << 20, dtype=torch.uint8, device="cuda")  # and gone again
        stats = memory_stats()
        expected = {
            "allocated_bytes": base,
            "peak_allocated_bytes": base + (32 << 20),
            "num_alloc_retries": 0,
        }
        assert {name: stats[name] for name in expected} == expected
        assert stats["peak_allocated_bytes"] <= stats["peak_reserved_bytes"] <= stats["total_bytes"]
        assert memory_stats(0) == memory_stats("cuda")
        assert reset_peak_memory("cuda:0") is True
        assert memory_stats()["peak_allocated_bytes"] == base


class Clock:
    now = 100.0

    def __call__(self):
        return self.now

    def meter(self, **options):
        return ThroughputMeter(**{"world_size": 1, "device": "cpu", "clock": self, **options})

    def run(self, meter, *steps):
        for num_tokens, seconds in steps:
            self.now += seconds
            meter.update(num_tokens=num_tokens)


@pytest.fixture
def clock():
    return Clock()


def check(meter, expected):
    """Of what a meter says, what is expected of it."""
    assert {name: value for name, value in meter.stats().items() if name in expected} == expected


STEPS = [(1000, 60.0), (1000, 2.0), (3000, 6.0)]
KNOWN = {"world_size": 2, "flops_per_token": 10**9, "peak_flops": 4e12, "warmup_steps": 0}
NOTHING = dict.fromkeys(("tokens_per_second", "step_seconds", "last_step_seconds", "mfu", "paused_share"))
METERS = {
    "a first step is not counted": (
        {"world_size": 4},
        STEPS,
        {
            "tokens_per_second": 500.0,
            "tokens_per_second_per_gpu": 125.0,
            "step_seconds": 4.0,
            "last_step_seconds": 6.0,
            "tflops_per_gpu": None,
            "mfu": None,
            "data_wait_share": None,
            "rank_wait_share": None,
            "paused_share": 0.0,
        },
    ),
    "without a warmup it is": ({"warmup_steps": 0}, [(1000, 4.0)], {"tokens_per_second": 250.0}),
    "nor are two of a longer warmup": ({"warmup_steps": 2}, STEPS, {"step_seconds": 6.0}),
    "nothing is known before": ({"flops_per_token": 10, "peak_flops": 1e12}, STEPS[:1], NOTHING),
    "the last steps count": ({"averaged_steps": 2}, [*STEPS, (100, 2.0)], {"tokens_per_second": 387.5}),
    "rate and use": (KNOWN, [(4000, 1.0)], {"tflops_per_gpu": 2.0, "mfu": 0.5}),
    "an unknown peak is none and not zero": (
        {**KNOWN, "peak_flops": None},
        [(4000, 1.0)],
        {"tflops_per_gpu": 2.0, "mfu": None},
    ),
}


class TestThroughputMeter:
    @pytest.mark.parametrize("case", METERS)
    def test_numbers(self, case, clock):
        options, steps, expected = METERS[case]
        meter = clock.meter(**options)
        clock.run(meter, *steps)
        check(meter, expected)

    def test_waiting_for_data_has_a_share(self, clock):
        meter = clock.meter()

        def batches():
            for seconds in (50.0, 1.0, 2.0):
                clock.now += seconds
                yield {"input_ids": torch.ones(1, 4)}

        for _ in fs.windows(batches(), 1, meter=meter):
            clock.run(meter, (8, 3.0))
        check(meter, {"data_wait_share": (1 + 2) / (1 + 3 + 2 + 3)})

    def test_a_pause_is_neither_time_nor_waiting_and_has_a_share_of_its_own(self, clock):
        meter = clock.meter()
        for paused in (50.0, 1.0, 0.0):
            with meter.paused():
                with meter.paused():  # the end of an inner one ends nothing
                    list(fs.windows([{"input_ids": torch.ones(1, 4)}], 1, meter=meter))
                    clock.now += paused / 2
                clock.now += paused / 2
            clock.run(meter, (8, 2.0))
        check(meter, {"paused_share": 1 / (2 + 2 + 1), "data_wait_share": 0.0, "step_seconds": 2.0})

    def test_a_pause_ends_with_an_error_too(self, clock):
        meter = clock.meter(warmup_steps=0)
        with pytest.raises(OSError, match="disk full"), meter.paused():
            clock.now += 9.0
            raise OSError("disk full")
        clock.run(meter, (10, 1.0))
        check(meter, {"step_seconds": 1.0})

    def test_update_inside_a_pause(self, clock):
        meter = clock.meter()
        with meter.paused(), pytest.raises(RuntimeError, match="leave the pause"):
            meter.update(num_tokens=1)

    @pytest.mark.gpu
    def test_queued_work_is_not_taken_for_a_pause(self):
        meter = ThroughputMeter(world_size=1, flops_per_token=1, warmup_steps=0)
        torch.cuda._sleep(2_000_000_000)  # about a second, queued and not waited for
        with meter.paused():
            pass
        meter.update(num_tokens=1)
        assert meter.stats()["step_seconds"] > 0.3
        assert meter.stats()["mfu"] is not None


# --- what a run reports: its log, waiting for other ranks' data, aggregation over ranks, the picture --------


def strict_lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


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
            assert time.time() - 60 < strict_lines(path)[0]["time"] <= time.time()
            logger.log({"phase": "eval\nα", "skipped": True}, step=torch.tensor(2))
            logger.log({"a": math.nan, "b": math.inf, "c": torch.tensor(-math.inf)}, 3)
        assert [{**line, "time": 0} for line in strict_lines(path)] == [
            {"step": 1, "time": 0, "loss": 2.5, "n": 3, "mfu": None},
            {"step": 2, "time": 0, "phase": "eval\nα", "skipped": True},
            {"step": 3, "time": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"},
        ]

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
        assert repr(rows) == repr([(3, {"loss": 0.5, "mfu": None})]), "no tensor"

    def test_other_ranks_write_and_call_nothing(self, tmp_path, monkeypatch, capsys):
        rows, path = [], tmp_path / "runs" / "m.jsonl"
        logger = MetricLogger(jsonl=path, sinks=[lambda row, step: rows.append(step)])
        # The rank is asked for at the first log, after the process group came up.
        monkeypatch.setattr("fsdp_sft.metrics.log.this_rank", lambda: 1)
        logger.log({"loss": 1.0}, 1)
        assert (path.parent.exists(), rows, capsys.readouterr().out) == (False, [], "")

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
    return meter.stats()


def test_waiting_for_another_ranks_data_is_seen():
    fast, slow = run_distributed(wait_shares, 2)
    assert fast["data_wait_share"] < 0.2 < 0.8 < fast["rank_wait_share"]
    assert slow["rank_wait_share"] < 0.2 < 0.8 < slow["data_wait_share"]


def aggregate_on_rank():
    rank = torch.distributed.get_rank()
    metrics = {"memory": [30, 10, 20][rank], "wait": [None, 0.25, 0.75][rank], "nobody": None}
    metrics |= {"bad": math.nan if rank == 1 else 1.0, f"of rank {rank}": rank}
    return {how: aggregate_metrics(metrics, reduce=how) for how in ("mean", "sum", "min", "max", "spread")}


class TestAggregate:
    def test_over_ranks(self):
        first, *others = run_distributed(aggregate_on_rank, 3)
        assert [str(other) for other in others] == [str(first)] * 2
        for how, most, wait in (("mean", 20, 0.5), ("sum", 60, 1.0), ("min", 10, 0.25), ("max", 30, 0.75)):
            found = first[how]
            assert (found["memory"], found["wait"], found["nobody"]) == (most, wait, None)
            assert math.isnan(found["bad"])
            assert [found[f"of rank {rank}"] for rank in range(3)] == [0, 1, 2], "known to one rank alone"
        spread = first["spread"]
        assert [spread[f"memory_{x}"] for x in ("min", "mean", "max", "max_rank")] == [10, 20, 30, 0]
        assert [spread[f"{name}_max_rank"] for name in ("wait", "nobody", "bad")] == [2, None, 1]
        MetricLogger(stdout=False).log(spread, 1)

    def test_single_process(self):
        assert aggregate_metrics({"a": 3, "b": None}, reduce="max") == {"a": 3, "b": None}


def curves(axes):
    """What is drawn into a panel: (steps, values) of each line."""
    lines = [line for line in axes.lines if len(line.get_xdata())]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in lines]


@pytest.mark.filterwarnings("error")  # of panels for which there is no room
class TestPlotRun:
    @pytest.fixture(autouse=True)
    def _matplotlib(self):
        pytest.importorskip("matplotlib", reason="the picture needs the 'plot' extra")

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
        image = pytest.importorskip("matplotlib.image")
        steps = [1, 2, 3]
        values = {
            "loss": [2.0, 1.0, 2.0 / 3],
            "grad_norm": [1.0, 1.0, 1.0],
            "lr": [0.01, 0.02, 0.03],
            "tokens_per_second": [100.0, 200.0, 300.0],
            "mfu": [0.5, 1.0, 1.5],
            "peak_allocated_bytes": [1 << 30, 2 << 30, 3 << 30],
        }
        rows = [(n, {name: column[n - 1] for name, column in values.items()}) for n in steps]
        panels = drawn([*rows, (3, {"eval_loss": 0.9})])
        picture = image.imread(tmp_path / "pictures" / "m.png")
        assert picture.shape[:2] == (840, 1320)
        assert len(set(picture.flatten().tolist())) > 50
        assert {title: curves(axes) for title, axes in panels.items()} == {
            "Loss": [(steps, values["loss"]), ([3], [0.9])],
            "Gradient norm": [(steps, values["grad_norm"])],
            "learning rate (dashed)": [(steps, values["lr"])],
            "Throughput": [(steps, values["tokens_per_second"])],
            "MFU (dashed)": [(steps, values["mfu"])],
            "Peak memory": [(steps, [1.0, 2.0, 3.0])],
        }

    def test_unknown_mfu_draws_no_axis_of_zeros(self, drawn):
        panels = drawn([(1, {"loss": 1.0, "tokens_per_second": 5.0, "mfu": None})])
        assert "MFU (dashed)" not in panels
        assert [text.get_text() for text in panels["Gradient norm"].texts] == ["not logged"]

    def test_resumed_run_and_broken_line(self, tmp_path, drawn):
        (tmp_path / "m.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo\n')
        panels = drawn([(2, {"loss": 9.0}), (2, {"loss": 2.0}), (3, {"loss": 1.0})])
        assert curves(panels["Loss"]) == [([1, 2, 3], [3.0, 2.0, 1.0])]

    def test_values_that_are_not_finite_are_marked(self, drawn):
        rows = [(1, {"loss": 1.0}), (2, {"loss": math.nan}), (3, {"loss": math.inf})]
        curve, crosses = curves(drawn(rows)["Loss"])
        assert curve[1] == pytest.approx([1.0, math.nan, math.nan], nan_ok=True)
        assert crosses == ([2, 3], [0, 0])

    def test_a_long_run_has_a_median(self, drawn):
        values = [1.0 if step % 10 else 50.0 for step in range(1, 401)]
        raw, median = curves(drawn([(i + 1, {"loss": value}) for i, value in enumerate(values)])["Loss"])
        assert (raw[1], set(median[1])) == (values, {1.0})

    def test_no_steps(self, tmp_path):
        (tmp_path / "m.jsonl").write_text('{"loss": 1}\n')
        with pytest.raises(ValueError, match="no line with a step"):
            plot_run(tmp_path / "m.jsonl", tmp_path / "m.png")

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

import fsdp_sft as fs
from fsdp_sft._process.gpus import known_device
from fsdp_sft.metrics import memory
from fsdp_sft.metrics.memory import memory_stats, reset_peak_memory
from fsdp_sft.metrics.throughput import ThroughputMeter, model_flops_per_token, peak_flops_per_second

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
    config._attn_implementation = (
        "eager"  # the counter has no formula for scaled_dot_product_attention on a CPU
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
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
        growth = model_flops_per_token(config, 32) - model_flops_per_token(config, 16)
        assert growth == 12 * 4 * 24 * 2 * 16

    def test_unused_window_is_ignored(self):
        config = transformers.Qwen2Config(**GQA, sliding_window=8, use_sliding_window=False)
        assert model_flops_per_token(config, 32) > model_flops_per_token(config, 8)

    def test_composite_config_counts_its_text_decoder(self):
        text = FAMILIES["gemma3-text"]()
        config = transformers.Gemma3Config(text_config=text.to_dict())
        assert model_flops_per_token(config, SEQ) == model_flops_per_token(text, SEQ)

    @pytest.mark.parametrize(
        ("config", "scan"),
        [
            (lambda: transformers.AfmoeConfig(**SMALL_MOE), None),
            (
                lambda: transformers.FalconConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4),
                None,
            ),
            (lambda: transformers.Gemma4UnifiedTextConfig(num_hidden_layers=6, hidden_size=64), None),
            (
                lambda: transformers.MambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=8),
                "MambaMixer",
            ),
        ],
    )
    def test_any_family_is_counted_and_what_is_not_seen_is_said(self, config, scan, caplog):
        with caplog.at_level("INFO"):
            flops = model_flops_per_token(config(), SEQ)
        assert flops > 0
        assert type(flops) is int
        told = "the elementwise recurrence" in caplog.text
        assert told == (scan is not None)
        assert scan is None or scan in caplog.text

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
        stats = memory_stats("cpu")
        assert set(stats) == {"peak_resident_bytes", "resident_bytes"}
        before = stats["resident_bytes"]
        held = torch.ones(128 << 20, dtype=torch.uint8)
        grown = memory_stats("cpu")["resident_bytes"] - before
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
        held = torch.ones(64 << 20, dtype=torch.uint8)
        del held
        before = memory_stats("cpu")
        if not reset_peak_memory("cpu"):
            pytest.skip("this system keeps one peak for the life of a process")
        after = memory_stats("cpu")
        assert after["peak_resident_bytes"] < before["peak_resident_bytes"]

    def test_other_device(self):
        with pytest.raises(ValueError, match="got meta"):
            memory_stats("meta")

    @pytest.mark.gpu
    def test_cuda(self):
        reset_peak_memory()
        base = memory_stats()["allocated_bytes"]
        held = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        del held
        stats = memory_stats()
        assert stats["allocated_bytes"] == base
        assert stats["peak_allocated_bytes"] == base + (32 << 20)
        assert stats["peak_allocated_bytes"] <= stats["peak_reserved_bytes"] <= stats["total_bytes"]
        assert stats["num_alloc_retries"] == 0
        assert memory_stats(0) == memory_stats("cuda")
        assert reset_peak_memory("cuda:0") is True
        assert memory_stats()["peak_allocated_bytes"] == base


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def run(meter, clock, steps):
    for num_tokens, seconds in steps:
        clock.now += seconds
        meter.update(num_tokens=num_tokens)


def mentioned(meter, expected):
    """Of what a meter says, what is expected of it."""
    return {name: meter.stats()[name] for name in expected}


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
        meter = ThroughputMeter(**{"world_size": 1, "device": "cpu", "clock": clock, **options})
        run(meter, clock, steps)
        assert mentioned(meter, expected) == expected

    def test_waiting_for_data_has_a_share(self, clock):
        meter = ThroughputMeter(world_size=1, device="cpu", clock=clock)

        def batches():
            for seconds in (50.0, 1.0, 2.0):
                clock.now += seconds
                yield {"input_ids": torch.ones(1, 4)}

        for _ in fs.windows(batches(), 1, meter=meter):
            run(meter, clock, [(8, 3.0)])
        assert meter.stats()["data_wait_share"] == (1 + 2) / (1 + 3 + 2 + 3)

    def test_a_pause_is_neither_time_nor_waiting_and_has_a_share_of_its_own(self, clock):
        meter = ThroughputMeter(world_size=1, device="cpu", clock=clock)
        for paused in (50.0, 1.0, 0.0):
            with meter.paused():
                with meter.paused():  # the end of an inner one ends nothing
                    list(fs.windows([{"input_ids": torch.ones(1, 4)}], 1, meter=meter))
                    clock.now += paused / 2
                clock.now += paused / 2
            run(meter, clock, [(8, 2.0)])
        assert meter.stats()["paused_share"] == 1 / (2 + 2 + 1)
        assert meter.stats()["data_wait_share"] == 0.0
        assert meter.stats()["step_seconds"] == 2.0

    def test_a_pause_ends_with_an_error_too(self, clock):
        meter = ThroughputMeter(world_size=1, device="cpu", clock=clock, warmup_steps=0)
        with pytest.raises(OSError, match="disk full"), meter.paused():
            clock.now += 9.0
            raise OSError("disk full")
        run(meter, clock, [(10, 1.0)])
        assert meter.stats()["step_seconds"] == 1.0

    def test_update_inside_a_pause(self, clock):
        meter = ThroughputMeter(world_size=1, device="cpu", clock=clock)
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

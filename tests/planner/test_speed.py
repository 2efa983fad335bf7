"""How long a step takes: what binds it, what makes it shorter, and what makes no difference."""

import itertools
from typing import Any

import pytest
import torch
import transformers as tf
from torch.utils.flop_counter import FlopCounterMode

import fsdp_sft as fs
from fsdp_sft.planner.model import build_skeleton
from fsdp_sft.planner.speed import StepTime, step_time
from fsdp_sft.planner.trace import trace
from tests.planner.families import LLAMA_8B, QWEN_14B

JOB: dict[str, Any] = {"num_gpus": 8, "micro_batch_size": 2, "seq_length": 4096, "attention_mask": False}


def seconds(config: Any = LLAMA_8B, **options: Any) -> StepTime:
    setup = fs.Run(**{**JOB, **options})
    return step_time(build_skeleton(config, setup), setup)


def test_identical_programs_take_identical_times() -> None:
    assert seconds(grad_sync="each") == seconds(grad_sync="last")
    assert seconds(dp_replicate=1) == seconds()
    assert seconds(sac_ratio=1, sac_placement="even") == seconds(sac_ratio=1, sac_placement="prefix")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek"])
def test_products_are_counted_as_torch_counts_them(family: str, compiled: bool) -> None:
    """A real model's forward and backward under FlopCounterMode, attention and the loss included."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 512}
    config = {
        "llama": lambda: tf.LlamaConfig(**sizes, intermediate_size=160, num_key_value_heads=2),
        "mixtral": lambda: tf.MixtralConfig(**sizes, intermediate_size=96, num_key_value_heads=2),
        "deepseek": lambda: tf.DeepseekV2Config(
            **sizes, intermediate_size=96, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=16,
            qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=2,
        ),
    }[family]()  # fmt: skip
    job = {**JOB, "num_gpus": 1, "seq_length": 64, "loss_impl": "logits", "gpu": "cpu", "compile": compiled}
    setup = fs.Run(**job)
    skeleton = build_skeleton(config, setup)
    seen = trace(skeleton, setup)
    blocks = [seen.blocks[kind] for kind in skeleton.kinds]
    stretches = [seen.rest, *(stretch for block in blocks for stretch in (block.forward, block.backward))]
    found = sum(flops for stretch in stretches for flops, _, attention in stretch if not attention)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = tf.AutoModelForCausalLM.from_config(config, **eager)
    ids = torch.zeros(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    batched = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "bmm" in str(op))
    assert found == pytest.approx(counter.get_total_flops() - batched, rel=0.02)


def test_what_asks_for_less_takes_less() -> None:
    plain, half, whole = (seconds(sac_ratio=ratio) for ratio in (0, "1/2", 1))
    assert seconds(compile=True).total < plain.total < half.total < whole.total
    assert plain.recompute == 0 < whole.recompute < seconds(sac_ratio=1, compile=True).compute / 3
    assert seconds(gpu="a100").total > 1.5 * plain.total
    assert seconds(optimizer="adamw_fused").optimizer < plain.optimizer


def test_frozen_weights_have_no_gradients() -> None:
    adapters = seconds(lora_rank=16, compile=True)
    assert adapters.compute < 0.85 * seconds(compile=True).compute
    assert adapters.communication < 0.7 * seconds().communication
    assert adapters.optimizer < 0.05 * seconds().optimizer


def test_a_slow_network_asks_for_other_layouts() -> None:
    gpu = "slow=79,989,3350,link=450,network=3"
    times = {
        (replicas, sync): seconds(
            num_gpus=64, gpu=gpu, dp_replicate=replicas, grad_sync=sync, grad_accum_steps=4
        ).total
        for replicas, sync in itertools.product((1, 8), ("each", "last"))
    }
    assert times[8, "last"] < times[1, "last"] < times[1, "each"]
    assert times[8, "last"] < times[8, "each"]
    job = {"num_gpus": 64, "seq_length": 4096, "global_batch_size": 256, "gpu": gpu}
    best, plain = (
        fs.plan_run(LLAMA_8B, **job, **options)[0].time
        for options in ({}, {"grad_sync": "each", "reshard_after_forward": True})
    )
    assert best.bound == "network"
    assert best.total < plain.total


@pytest.mark.parametrize(
    ("published", "gpu", "num_gpus", "options"),
    [
        # https://github.com/foundation-model-stack/fms-fsdp: Llama 2 7B, 2 x 4096, nothing checkpointed
        (4550, "a100", 128, {"compile": True}),
        (9600, "h100", 96, {"compile": True}),
        # https://github.com/KempnerInstitute/KempnerForge, mfu_scaling_2026-04-05: Llama 3 8B, 4 x 4096
        (9746, "h200", 4, {"compile": True, "sac_ratio": 1, "micro_batch_size": 4}),
    ],
)
def test_published_speeds(published: int, gpu: str, num_gpus: int, options: dict[str, Any]) -> None:
    llama_2 = tf.LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
    config, masters = (LLAMA_8B, torch.bfloat16) if gpu == "h200" else (llama_2, torch.float32)
    given = {**JOB, "loss_impl": "logits", "master_dtype": masters, **options}
    time = seconds(config, **{**given, "gpu": gpu, "num_gpus": num_gpus})
    assert given["micro_batch_size"] * 4096 / time.total == pytest.approx(published, rel=0.25)


def test_a_plan_says_what_binds_it_and_how_to_run_it() -> None:
    job = {"num_gpus": 16, "gpu": "a100-40gb", "seq_length": 4096, "global_batch_size": 64}
    plan = fs.plan_run(QWEN_14B, **job, sac_placement="prefix")[0]
    assert plan.reasons[0].startswith("bound by compute (a micro-step: compute ")
    for part in (
        "fs.load_pretrained('Qwen/Qwen2.5-14B', mesh=mesh",
        f"fs.apply_sac(model, '{plan.run.sac_ratio}', placement='prefix'",
        f"DataLoader(rows, {plan.run.micro_batch_size}, sampler=fs.ResumableSampler(rows)",
        f"grad_accum_steps={plan.run.grad_accum_steps}",
    ):
        assert part in plan.code("Qwen/Qwen2.5-14B")
    found = plan.to_dict()
    assert found["peak_bytes"] == plan.peak_bytes == sum(found["breakdown_bytes"].values())
    assert found["tokens_per_second_per_gpu"] == pytest.approx(64 * 4096 / plan.time.total / 16)

"""Packed frozen weights in a plan: the same weights and bytes that shards have, seconds, advice and code."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

import fsdp_sft as fs
from fsdp_sft._process.gpus import gpu_named
from fsdp_sft._tensors.boxes import local_of
from fsdp_sft._tensors.packed_shard import PackedShard
from fsdp_sft.commands import main
from fsdp_sft.planner.estimate import budget_of
from fsdp_sft.planner.model import as_config, build_skeleton
from fsdp_sft.planner.parameters import group_sizes
from fsdp_sft.planner.speed import step_time
from fsdp_sft.shard.packing import KINDS
from tests.harness.composed import composed
from tests.harness.device import mesh_here
from tests.harness.quantised_folders import deepseek_folder, mxfp4_folder
from tests.harness.ranks import run_distributed
from tests.planner.families import LLAMA_8B

TARGETS = ["q_proj", "o_proj", "q_a_proj"]
RANKS = 3
JOB: dict[str, Any] = {"num_gpus": 8, "micro_batch_size": 1, "seq_length": 2048, "attention_mask": False}
SIZES = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}
LLAMA_70B = tf.LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, **SIZES)


def _gpt_oss_120b() -> Any:
    """https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json."""
    config = tf.GptOssConfig(num_hidden_layers=36, num_local_experts=128)
    outside = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": outside}
    return config


def _deepseek_v4_flash() -> Any:
    """DeepSeek-V4-Flash, whose sizes are the defaults of its class."""
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}
    return tf.DeepseekV4Config(quantization_config=settings)


FOLDERS = {"gpt-oss": mxfp4_folder, "deepseek-v3": deepseek_folder}


def _shards(root: Path) -> dict[str, Any]:
    """For each folder and way to pack: names of what is packed, and its bytes on this rank."""
    peft = pytest.importorskip("peft")
    found = {}
    for family in FOLDERS:
        for kind in KINDS:
            lora = peft.LoraConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM")
            model = composed(root / family, mesh=mesh_here(), peft_config=lora, frozen_dtype=kind)
            shards = {n: s for n, p in model.named_parameters() if isinstance(s := local_of(p), PackedShard)}
            names = {name.removeprefix("base_model.model.").replace(".base_layer", "") for name in shards}
            size = sum(shard.rows.numel() for shard in shards.values())
            found[f"{family} {kind}"] = (names, size)
    return found


@pytest.fixture(scope="module")
def shards(tmp_path_factory: Any) -> tuple[Path, dict[str, Any]]:
    pytest.importorskip("peft", reason="adapters need the 'peft' extra")
    root = tmp_path_factory.mktemp("bases")
    for family, write in FOLDERS.items():
        write(root / family)
    return root, run_distributed(_shards, RANKS, root)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FOLDERS)
def test_the_plan_packs_what_shards_pack(shards: Any, family: str, kind: str) -> None:
    root, found = shards
    names, size = found[f"{family} {kind}"]
    setup = fs.Run(
        num_gpus=RANKS, micro_batch_size=1, seq_length=8, lora_rank=2, lora_targets=TARGETS, frozen_dtype=kind
    )
    skeleton = build_skeleton(as_config(root / family), setup)
    packed = [layout for group in skeleton.groups for layout in group_sizes(group, setup).packed]
    assert len(packed) == len(names)
    assert sum(layout.shard_rows(RANKS) * layout.form.row_bytes for layout in packed) == size


def test_bits_of_a_parameter() -> None:
    def held(config: Any, **options: Any) -> float:
        memory = fs.estimate_memory(config, fs.Run(**JOB, lora_rank=8, sac_ratio=1, **options))
        return memory.breakdown["parameters (shards)"] * 8 * JOB["num_gpus"]

    run = fs.Run(**JOB, lora_rank=8, frozen_dtype="nf4")
    linear = sum(
        layout.shape[0] * layout.shape[1]
        for group in build_skeleton(LLAMA_70B, run).groups
        for layout in group_sizes(group, run).packed
    )
    assert linear == 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    plain = held(LLAMA_70B)
    assert plain - held(LLAMA_70B, frozen_dtype="nf4") == linear * (16 - 4.25)
    assert plain - held(LLAMA_70B, frozen_dtype="fp8") == linear * (16 - 8.25)


def test_few_experts_on_many_ranks_are_planned() -> None:
    config = tf.Qwen3MoeConfig(
        hidden_size=256, moe_intermediate_size=128, num_experts=8, num_hidden_layers=2, vocab_size=512
    )
    run = {**JOB, "num_gpus": 64, "seq_length": 64, "lora_rank": 8, "frozen_dtype": "nf4"}
    memory = fs.estimate_memory(config, fs.Run(**run))
    assert sum(memory.breakdown.values()) == memory.peak_bytes > memory.breakdown["parameters (shards)"] > 0


def test_seconds_have_the_bytes_of_gathers_and_the_values_in_them() -> None:
    def seconds(**options: Any) -> Any:
        setup = fs.Run(**JOB, lora_rank=8, sac_ratio=1, gpu="h100", **options)
        return step_time(build_skeleton(LLAMA_70B, setup), setup)

    plain, packed, kept = (
        seconds(),
        seconds(frozen_dtype="nf4"),
        seconds(frozen_dtype="nf4", reshard_after_forward=False),
    )
    assert packed.communication == pytest.approx(plain.communication * 4.25 / 16, rel=0.05)
    # In each gather the values are computed, and their bytes are copied, fewer than those of a plain gather.
    once = packed.compute - kept.compute
    assert packed.compute > plain.compute + once
    assert kept.compute > plain.compute


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (LLAMA_8B, {"frozen_dtype": "nf4"}, "no matrix in a block is frozen: give lora_rank"),
        (LLAMA_8B, {"frozen_dtype": "stored", "lora_rank": 8}, "the config has no quantization_config"),
        (LLAMA_8B, {"frozen_dtype": "int4", "lora_rank": 8}, "must be one of .*'stored', 'nf4', 'fp8'"),
    ],
)
def test_what_cannot_be_packed_is_refused(config: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fs.estimate_memory(config, fs.Run(**JOB, **options))


def test_rows_without_bytes_of_their_own_are_refused() -> None:
    config = tf.LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(
        ValueError, match=r"config \(bitsandbytes\) does not say .* 'nf4' or 'fp8' packs them anew"
    ):
        fs.estimate_memory(config, fs.Run(**JOB, lora_rank=8, frozen_dtype="stored"))
    packed = fs.estimate_memory(config, fs.Run(**JOB, lora_rank=8, frozen_dtype="nf4"))
    assert "packs frozen matrices anew (nf4)" in packed.notes[0]


def test_what_a_config_leaves_in_16_bits_is_not_packed() -> None:
    config = tf.LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    config.quantization_config = {"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]}
    setup = fs.Run(**JOB, lora_rank=8, frozen_dtype="stored")
    (group,) = build_skeleton(config, setup).groups
    assert sorted(layout.shape for layout in group_sizes(group, setup).packed) == [
        (256, 512),
        (512, 256),
        (512, 256),
    ]


def _advice(config: Any, num_gpus: int, gpu: str, **options: Any) -> list[str]:
    job = {"seq_length": 2048, "global_batch_size": num_gpus, "attention_mask": False, **options}
    with pytest.raises(fs.NoPlanError) as error:
        fs.plan_run(config, num_gpus=num_gpus, gpu=gpu, **job)
    return str(error.value).splitlines()


def _fits(config: Any, num_gpus: int, gpu: str, **options: Any) -> fs.RunPlan:
    job = {"seq_length": 2048, "global_batch_size": num_gpus, "attention_mask": False, "lora_rank": 16}
    plan = fs.plan_run(config, num_gpus=num_gpus, gpu=gpu, **{**job, **options})[0]
    assert plan.peak_bytes <= budget_of(plan.run.device, num_gpus).usable_bytes
    return plan


def test_8b_on_one_card_of_24_gb() -> None:
    plain, packed = (_fits(LLAMA_8B, 1, "4090", **way) for way in ({}, {"frozen_dtype": "nf4"}))
    assert packed.estimate.breakdown["parameters (shards)"] < 6 * 2**30
    assert packed.run.sac_ratio < plain.run.sac_ratio, "less has to be recomputed"
    assert "frozen_dtype='nf4')" in packed.code()
    lines = _advice(LLAMA_8B, 1, "mine=12,165,1008", lora_rank=16)
    assert "--lora 16 --frozen-dtype nf4" in lines[-1]
    assert "--lora 16 --frozen-dtype nf4" in _advice(LLAMA_8B, 1, "mine=12,165,1008")[-1]


def test_the_largest_mixtures_on_one_node_as_they_are_published() -> None:
    usable = budget_of(gpu_named("h100"), 8).usable_bytes
    oss = [
        fs.estimate_memory(_gpt_oss_120b(), fs.Run(**JOB, lora_rank=16, sac_ratio=1, frozen_dtype=kind))
        for kind in (None, "stored")
    ]
    assert oss[1].peak_bytes < oss[0].peak_bytes < usable
    assert oss[1].breakdown["parameters (shards)"] < 0.3 * oss[0].breakdown["parameters (shards)"]
    lines = _advice(_deepseek_v4_flash(), 8, "h100")
    assert "--lora 16 --frozen-dtype stored; " in lines[-1]
    assert "nf4" not in lines[-1]
    memory = fs.estimate_memory(_deepseek_v4_flash(), fs.Run(**JOB, lora_rank=16, frozen_dtype="stored"))
    assert "assumed from the config alone" in memory.notes[0]


def test_a_base_is_not_rounded_where_adapters_on_another_fit() -> None:
    lines = _advice(LLAMA_8B, 1, "4090")
    assert ": --lora 16; " in lines[-1]
    assert "nf4" not in lines[-1]


def test_the_command_takes_and_names_it(tmp_path: Path, capsys: Any) -> None:
    LLAMA_8B.save_pretrained(tmp_path)
    job = ["plan", "--model", str(tmp_path), "--gpus", "1", "--gpu", "4090", "--seq", "2048"]
    job += ["--global-batch", "1", "--no-padding"]
    assert main([*job, "--lora", "16", "--frozen-dtype", "nf4"]) == 0
    text = capsys.readouterr().out
    assert "frozen_dtype='nf4'" in text
    assert main([*job, "--frozen-dtype", "nf4"]) == 2
    assert "--frozen-dtype='nf4' is for frozen weights" in capsys.readouterr().err
    for kind in KINDS[1:]:
        assert main([*job, "--lora", "16", "--json", "--frozen-dtype", kind]) == 0
        assert json.loads(capsys.readouterr().out)["plans"][0]["frozen_dtype"] == kind

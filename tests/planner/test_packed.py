"""Packed frozen weights in a plan: the same weights and bytes that shards have, seconds, advice and code."""

import itertools
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
from fsdp_sft.planner.model import build_skeleton
from fsdp_sft.planner.parameters import group_sizes
from fsdp_sft.shard.packing import KINDS
from tests.harness.composed import composed
from tests.harness.device import mesh_here
from tests.harness.quantised_folders import configure, deepseek_folder, mxfp4_folder
from tests.harness.ranks import run_distributed
from tests.planner.families import LLAMA_8B

TARGETS = ["q_proj", "o_proj", "q_a_proj"]
RANKS = 3
JOB: dict[str, Any] = {"num_gpus": 8, "micro_batch_size": 1, "seq_length": 2048, "attention_mask": False}


# https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json
GPT_OSS_120B = tf.GptOssConfig(
    num_hidden_layers=36,
    num_local_experts=128,
    quantization_config={
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
        ],
    },
)
# Its sizes are the defaults of its class.
DEEPSEEK_V4_FLASH = tf.DeepseekV4Config(
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}
)
FOLDERS = {"gpt-oss": mxfp4_folder, "deepseek-v3": deepseek_folder}


def _shards(root: Path) -> dict[str, Any]:
    """For each folder and way to pack: how many matrices are packed, and their bytes on this rank."""
    peft = pytest.importorskip("peft")
    found = {}
    for family, kind in itertools.product(FOLDERS, KINDS):
        lora = peft.LoraConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM")
        model = composed(root / family, mesh=mesh_here(), peft_config=lora, frozen_dtype=kind)
        shards = map(local_of, model.parameters())
        packed = [shard.rows.numel() for shard in shards if isinstance(shard, PackedShard)]
        found[f"{family} {kind}"] = len(packed), sum(packed)
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
    job = {"num_gpus": RANKS, "frozen_dtype": kind, "lora_rank": 2, "lora_targets": TARGETS}
    packed = _packed(root / family, fs.Run(**job, micro_batch_size=1, seq_length=8))
    size = sum(layout.shard_rows(RANKS) * layout.form.row_bytes for layout in packed)
    assert (len(packed), size) == found[f"{family} {kind}"]


def _packed(config: Any, run: fs.Run) -> list[Any]:
    return [
        layout for group in build_skeleton(config, run).groups for layout in group_sizes(group, run).packed
    ]


def test_what_a_config_leaves_in_16_bits_is_not_packed() -> None:
    config = tf.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        quantization_config={"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]},
    )
    packed = _packed(config, fs.Run(**JOB, lora_rank=8, frozen_dtype="stored"))
    assert sorted(layout.shape for layout in packed) == [(256, 512), (512, 256), (512, 256)]


def _advice(config: Any, num_gpus: int, gpu: str, **options: Any) -> str:
    job = {"seq_length": 2048, "global_batch_size": num_gpus, "attention_mask": False, **options}
    with pytest.raises(fs.NoPlanError) as error:
        fs.plan_run(config, num_gpus=num_gpus, gpu=gpu, **job)
    return str(error.value).splitlines()[-1]


def test_8b_on_one_card_of_24_gb() -> None:
    job = {"num_gpus": 1, "gpu": "4090", "seq_length": 2048, "global_batch_size": 1, "attention_mask": False}
    plain, packed = (
        fs.plan_run(LLAMA_8B, **job, lora_rank=16, **way)[0] for way in ({}, {"frozen_dtype": "nf4"})
    )
    assert packed.estimate.breakdown["parameters (shards)"] < 6 * 2**30
    assert packed.run.sac_ratio < plain.run.sac_ratio, "less has to be recomputed"
    assert "frozen_dtype='nf4')" in packed.code()
    for options in ({"lora_rank": 16}, {}):
        assert "--lora 16 --frozen-dtype nf4" in _advice(LLAMA_8B, 1, "mine=12,165,1008", **options)
    line = _advice(LLAMA_8B, 1, "4090")
    assert ": lora_rank=16 (--lora 16); " in line
    assert "nf4" not in line, "a base is not rounded where adapters on another fit"


def test_the_largest_mixtures_on_one_node_as_they_are_published() -> None:
    plain, packed = (
        fs.estimate_memory(GPT_OSS_120B, fs.Run(**JOB, lora_rank=16, sac_ratio=1, frozen_dtype=kind))
        for kind in (None, "stored")
    )
    assert packed.peak_bytes < plain.peak_bytes < budget_of(gpu_named("h100"), 8).usable_bytes
    assert packed.breakdown["parameters (shards)"] < 0.3 * plain.breakdown["parameters (shards)"]
    line = _advice(GPT_OSS_120B, 8, "4090")
    assert "(--lora 16 --frozen-dtype stored); " in line
    assert "nf4" not in line
    plain, packed = (
        fs.estimate_memory(DEEPSEEK_V4_FLASH, fs.Run(**JOB, lora_rank=16, sac_ratio=1, frozen_dtype=kind))
        for kind in (None, "stored")
    )
    assert packed.peak_bytes < budget_of(gpu_named("h100"), 8).usable_bytes < plain.peak_bytes
    assert "assumed from the config alone" in packed.notes[0]


def test_the_command_takes_and_names_it(tmp_path: Path, capsys: Any) -> None:
    LLAMA_8B.save_pretrained(tmp_path)
    job = "--gpus 1 --gpu 4090 --seq 2048 --global-batch 1 --no-padding"
    words = ["plan", "--model", str(tmp_path), *job.split()]
    assert main([*words, "--frozen-dtype", "nf4"]) == 2
    assert "--frozen-dtype='nf4' is for frozen weights" in capsys.readouterr().err
    assert main([*words, "--lora", "16", "--json", "--frozen-dtype", "nf4"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["frozen_dtype"] == "nf4"


# --- configs of quantised checkpoints: planned as what is loaded from them ---------------------------------

RUN = fs.Run(num_gpus=2, micro_batch_size=1, seq_length=32)


@pytest.mark.parametrize("write", [mxfp4_folder, deepseek_folder], ids=["gpt-oss", "deepseek-v3"])
def test_memory_is_that_of_the_dequantised_model(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    quantised = fs.estimate_memory(tmp_path, RUN)
    configure(tmp_path, quantization_config=None)
    plain = fs.estimate_memory(tmp_path, RUN)
    assert quantised.peak_bytes == plain.peak_bytes
    assert "is published quantised" in quantised.notes[0]
    assert not any("quantised" in note for note in plain.notes)

"""What packed frozen weights take on a simulated device, beside the planner's estimate."""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import fsdp_sft as fs
from fsdp_sft._process.gpus import gpu_named
from fsdp_sft.planner import MemoryEstimate
from fsdp_sft.planner.model import as_config
from tests.harness.composed import composed
from tests.harness.quantised_folders import mxfp4_folder
from tests.simulated.ranks import run_simulated

peft = pytest.importorskip("peft", reason="adapters need the 'peft' extra")

LENGTH, RANK = 256, 8
# Matmuls of bfloat16 take forty times as long as float32's on CPUs without AVX-512: few tokens, small layers.
BATCHES = {"dense": 1, "sparse": 2, "oss": 2}
LARGEST_ERROR = 0.01
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
COMMON = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
DENSE = tf.LlamaConfig(hidden_size=256, intermediate_size=768, vocab_size=256, **COMMON)
SPARSE = tf.Qwen3MoeConfig(
    hidden_size=256,
    moe_intermediate_size=128,
    num_experts=6,
    num_experts_per_tok=2,
    head_dim=64,
    vocab_size=512,
    **COMMON,
)
OSS = tf.GptOssConfig(
    hidden_size=256,
    intermediate_size=128,
    num_local_experts=6,
    num_experts_per_tok=2,
    head_dim=64,
    vocab_size=512,
    **COMMON,
)
MODELS = {"dense": DENSE, "sparse": SPARSE, "oss": OSS}

# (model, how frozen weights are kept, replicas, further options)
CASES: list[tuple[str, Any, int, dict[str, Any]]] = [
    ("dense", None, 1, {}),
    ("dense", "nf4", 1, {}),
    ("dense", "nf4", 1, {"reshard_after_forward": False}),
    ("dense", "nf4", 2, {"sac_ratio": "1"}),
    ("dense", "fp8", 1, {"sac_ratio": "1/2"}),
    ("sparse", "nf4", 1, {}),
    ("sparse", "nf4", 2, {"reshard_after_forward": False}),
    ("sparse", "nf4", 1, {"ep_size": 2}),
    ("oss", "stored", 1, {}),
    ("oss", None, 1, {"sac_ratio": "1"}),
    ("oss", "stored", 1, {"sac_ratio": "1"}),
]


def _use(folder: Path, cases: list[Any]) -> list[tuple[int, int]]:
    """(bytes held between two steps, most bytes in use in a step), for each case."""
    fs.init_distributed()
    found = []
    for name, kind, replicas, options in cases:
        lora = peft.LoraConfig(r=RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
        mesh = fs.build_mesh(dp_replicate=replicas)
        model = composed(folder / name, mesh=mesh, peft_config=lora, frozen_dtype=kind, **options)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
        ids = torch.arange(BATCHES[name] * LENGTH).view(-1, LENGTH) % (MODELS[name].vocab_size - 12) + 3
        for _ in range(2):
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            fs.train_step(model, [{"input_ids": ids, "labels": ids}], optimizer, check=False)
        torch.accelerator.synchronize()
        stats = torch.accelerator.memory_stats()
        found.append((stats["requested_bytes.all.current"], stats["requested_bytes.all.peak"]))
        del model, optimizer
        gc.collect()
    return found


def _folders(root: Path) -> None:
    """The models in bfloat16, and the experts of gpt-oss in MXFP4."""
    for name, config in MODELS.items():
        torch.manual_seed(0)
        if name == "oss":
            mxfp4_folder(root / name, config)
        else:
            tf.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(root / name)


def _expected(root: Path, case: Any) -> MemoryEstimate:
    """The planner's estimate of a case."""
    name, kind, replicas, options = case
    run = {"num_gpus": 4, "dp_replicate": replicas, "micro_batch_size": BATCHES[name], "seq_length": LENGTH}
    run |= {"lora_rank": RANK, "lora_targets": TARGETS, "frozen_dtype": kind, "attention_mask": False}
    setup = fs.Run(gpu="cpu", logits_dtype=torch.float32, **run, **options)
    device = dataclasses.replace(gpu_named("cpu"), name="simulated")
    return fs.estimate_memory(as_config(root / name), dataclasses.replace(setup, gpu=device))


@pytest.mark.timeout(660)
def test_the_estimate_is_what_a_device_has_in_use(tmp_path: Path) -> None:
    _folders(tmp_path)
    found = run_simulated(_use, 4, tmp_path, CASES, devices=4, timeout=600)[0]
    memory = [_expected(tmp_path, case) for case in CASES]
    for case, (held, peak), estimated in zip(CASES, found, memory, strict=True):
        kept = sum(estimated.breakdown.get(part, 0) for part in ("parameters (shards)", "optimizer states"))
        assert kept == pytest.approx(held, rel=1e-3, abs=1024), case
        # gpt-oss's experts take some more in their backward than planned, whatever they are stored in.
        if case not in CASES[-2:]:
            assert estimated.peak_bytes == pytest.approx(peak, rel=LARGEST_ERROR), case
    (_, plain), (_, packed) = found[-2:]
    saved = memory[-2].peak_bytes - memory[-1].peak_bytes
    assert plain - packed == pytest.approx(saved, abs=1e-4 * plain)

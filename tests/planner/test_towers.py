"""What towers take on a simulated device: trained, frozen and left out, beside the planner's estimate."""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import fsdp_sft as fs
from fsdp_sft._model.towers import towers_of
from fsdp_sft._process.gpus import gpu_named
from tests.simulated.ranks import run_simulated

RANKS, BATCH, LENGTH = 2, 2, 256


def _config() -> Any:
    text = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    seen = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
    return tf.LlavaConfig(
        text_config={"model_type": "llama", **text, **heads},
        vision_config={"model_type": "clip_vision_model", **seen, "image_size": 56, "patch_size": 14},
        image_token_index=2,
    )


def _use(folder: Path) -> dict[str, tuple[int, int]]:
    """(bytes held between two steps, most bytes in use in a step), for each way to load the towers."""
    fs.init_distributed()
    found = {}
    ways: dict[str, dict[str, Any]] = {
        "trained": {"freeze_towers": False},
        "frozen": {},
    }
    for way, options in ways.items():
        model: Any = fs.load_pretrained(folder, mesh=fs.build_mesh(), sac_ratio="1/2", **options)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
        for parameter in model.parameters():  # text gives a tower no gradient, and AdamW no state without
            if parameter.requires_grad:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 500 + 3
        for _ in range(2):
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            fs.train_step(model, [{"input_ids": ids, "labels": ids}], optimizer, check=False)
        torch.accelerator.synchronize()
        stats = torch.accelerator.memory_stats()
        found[way] = stats["requested_bytes.all.current"], stats["requested_bytes.all.peak"]
        del model, optimizer, parameter
        gc.collect()
    return found


@pytest.fixture(scope="module")
def used(tmp_path_factory: Any) -> tuple[int, dict[str, tuple[int, int]]]:
    """(parameters of the towers, what the ways take)."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    model = tf.LlavaForConditionalGeneration(_config()).to(torch.bfloat16)
    model.save_pretrained(folder)
    sizes = sum(p.numel() for name in towers_of(model) for p in model.get_submodule(name).parameters())
    return sizes, run_simulated(_use, RANKS, folder, devices=4, timeout=600)[0]


def test_frozen_towers_are_two_bytes_a_parameter_and_trained_ones_twelve(used: Any) -> None:
    parameters, found = used
    held = {way: bytes_ for way, (bytes_, _) in found.items()}
    print({way: f"{bytes_ / 2**20:.2f} MiB" for way, bytes_ in held.items()}, parameters)
    share = parameters / RANKS
    assert held["trained"] - held["frozen"] == pytest.approx(10 * share, rel=0.02)


def test_the_planner_knows_what_frozen_towers_take(used: Any) -> None:
    _, found = used
    options = {"num_gpus": RANKS, "micro_batch_size": BATCH, "seq_length": LENGTH, "sac_ratio": "1/2"}
    setup = fs.Run(gpu="cpu", logits_dtype=torch.float32, **options)
    device = dataclasses.replace(gpu_named("cpu"), name="simulated")
    expected = fs.estimate_memory(_config(), dataclasses.replace(setup, gpu=device))
    assert expected.peak_bytes == pytest.approx(found["frozen"][1], rel=0.01)

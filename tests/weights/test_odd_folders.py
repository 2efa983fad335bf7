"""Forms in which repositories come: a bare class, another class, other formats beside, adapters, layers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.composed import composed
from tests.harness.device import mesh_here
from tests.harness.hf_folders import difference, loaded, plain, rewrite, save_tiny, tensors_of
from tests.harness.models import tiny_model
from tests.harness.ranks import on_ranks, run_distributed

BLOOM = {"vocab_size": 101, "hidden_size": 32, "n_layer": 2, "n_head": 4}
LATENT = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "q_lora_rank": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
# As published: each expert (in, out), in tensors that are too large to be read by every rank.
LARGE = {
    "hidden_size": 512, "intermediate_size": 64, "moe_intermediate_size": 384, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 101,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}  # fmt: skip
TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 512,
    "deepstack_visual_indexes": [0],
}  # fmt: skip


def test_a_config_that_names_the_class_without_a_head(tmp_path: Path) -> None:
    tf.BloomForCausalLM(tf.BloomConfig(**BLOOM)).transformer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BloomModel"]
    model = loaded(tmp_path)
    oracle = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    assert type(model) is type(oracle)
    assert difference(model, oracle) == []
    assert type(fs.build_meta_model(tmp_path, architectures=["BloomModel"])) is tf.BloomModel


def test_layers_behind_the_last_are_left_unread_if_the_config_counts_them(tmp_path: Path) -> None:
    tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**LATENT)).save_pretrained(tmp_path / "base")
    further = {
        f"{name}.weight": torch.ones(32, 64)
        for name in ("model.layers.2.eh_proj", "model.layers.3.eh_proj", "visual.layers.2.proj")
    }
    rewrite(tmp_path / "base", tensors_of(tmp_path / "base") | further)
    with pytest.raises(
        fs.CheckpointFormatError, match=r"place for model\.layers\.3\S* visual\.layers\.2.*'ignore'"
    ):
        loaded(tmp_path / "base")
    model = loaded(tmp_path / "base", unexpected="ignore")
    fs.export_hf(model, tmp_path / "out", dtype=torch.float32)
    assert model.config.num_nextn_predict_layers == 1, "the model's own"
    assert difference(model, plain(tmp_path / "out")) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("consolidated.safetensors", "put the repository's model*.safetensors beside"),
        ("tiny-Q8_0.gguf", "GGUF, the format of llama.cpp, is not read"),
        ("shard-00001-model-00001-of-00001.safetensors", "HuggingFaceStorageReader(folder)"),
    ],
)
def test_files_of_another_format_alone(other: str, words: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, max_shard_size="1GB")
    (tmp_path / "model.safetensors").rename(tmp_path / other)
    with pytest.raises(fs.CheckpointFormatError, match=re.escape(words)):
        loaded(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / other).read_bytes())
    assert difference(loaded(tmp_path), plain(tmp_path)) == []
    (tmp_path / "config.json").unlink()
    with pytest.raises(fs.CheckpointFormatError, match=re.escape(words)):
        fs.build_meta_model(tmp_path)


@pytest.mark.parametrize("saved", ["mixtral"], indirect=True)
def test_experts_under_another_name_are_named(saved: Path) -> None:
    stored = {name: value for name, value in tensors_of(saved).items() if ".experts." not in name}
    rewrite(saved, stored | {"model.layers.0.mlp.switch_mlp.up_proj.weight": torch.ones(4, 4)})
    with pytest.raises(fs.CheckpointFormatError, match=r"no values for .*experts.*; it has .*switch_mlp\.up"):
        loaded(saved)


def _check_transposed(folder: Path) -> None:
    model = fs.load_pretrained(folder, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy())
    report = model.load_report
    assert report.job_bytes_read <= 1.05 * report.checkpoint_bytes, "each rank reads its own experts alone"
    assert [problem for problem in difference(model, plain(folder)) if ".visual." not in problem] == [], (
        "but for the tower, which is frozen"
    )


def test_large_experts_that_are_stored_transposed(tmp_path: Path) -> None:
    config = tf.Qwen3VLMoeConfig(text_config=LARGE, vision_config=TOWER)
    tf.Qwen3VLMoeForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(tmp_path)
    rewrite(
        tmp_path, {n: t.mT.contiguous() if ".experts." in n else t for n, t in tensors_of(tmp_path).items()}
    )
    run_distributed(_check_transposed, 2, tmp_path)


def test_an_adapter_beside_weights_is_not_left_out(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, own, out = tmp_path / "base", tmp_path / "own", tmp_path / "out"
    tiny_model("llama").save_pretrained(base)
    lora = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tf.AutoModelForCausalLM.from_pretrained(base), lora).eval()
    adapted.save_pretrained(base)
    advice = "PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(out)"
    with pytest.raises(fs.CheckpointFormatError, match=re.escape(advice)):
        loaded(base)
    own.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (base / name).rename(own / name)
    whole = tf.AutoModelForCausalLM.from_pretrained(base)
    peft.PeftModel.from_pretrained(whole, own).merge_and_unload().save_pretrained(out)
    ids = torch.arange(3, 21).view(2, 9)
    assert torch.allclose(loaded(out).eval()(input_ids=ids).logits, adapted(input_ids=ids).logits, atol=1e-5)
    with pytest.raises(fs.CheckpointFormatError, match=r"config\.json"):
        fs.build_meta_model(own)


# --- the class that is asked for is the class that is built ------------------------------------------------

CLASSIFIER = "LlamaForSequenceClassification"


@on_ranks(2)
def test_a_class_that_the_config_does_not_name(saved: Path) -> None:
    model = composed(
        saved,
        mesh=mesh_here(),
        missing="initialise",
        unexpected="ignore",
        config_overrides={"architectures": [CLASSIFIER], "num_labels": 3},
    )
    torch.manual_seed(0)
    expected = tf.LlamaForSequenceClassification.from_pretrained(saved, num_labels=3, dtype=torch.float32)
    assert (type(model).__name__, model.config.architectures) == (f"FSDP{CLASSIFIER}", [CLASSIFIER])
    assert difference(model, expected.train()) == []
    assert type(fs.build_meta_model(saved, architectures=CLASSIFIER)).__name__ == CLASSIFIER


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["MistralForCausalLM"], "models of type 'mistral'.*'llama'"),
        (["LlamaForNothing"], "has no LlamaForNothing"),
        ([], "architectures="),
        ([7], "has no 7"),
    ],
)
def test_a_class_that_cannot_be_built(saved: Path, names: Any, words: str) -> None:
    with pytest.raises(fs.CheckpointFormatError, match=words):
        fs.build_meta_model(saved, architectures=names)


class Actor(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.mark.parametrize("saved", ["mixtral"], indirect=True)
@on_ranks(2)
def test_a_module_around_a_model_is_told_what_to_pass(saved: Path, tmp_path: Path) -> None:
    model: Any = Actor(fs.build_meta_model(saved))
    fs.shard_model(model, mesh=mesh_here())
    for call in (
        lambda: fs.load_weights(model, saved),
        lambda: fs.export_hf(model, tmp_path / "out"),
        lambda: fs.check_export(tmp_path / "out", model=model),
        lambda: fs.iter_hf_tensors(model),
    ):
        with pytest.raises(TypeError, match=r"pass the one inside, model\.model, which"):
            call()
    with pytest.raises(TypeError, match="load_full_state_dict reads a module of one's own"):
        fs.load_weights(nn.Linear(2, 2), saved)

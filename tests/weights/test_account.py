"""Every tensor of a loaded model has a value that something gave it, or the load is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.harness.composed import composed
from tests.harness.hf_folders import difference, plain, save_tiny
from tests.harness.models import FLOAT32, full, tiny_model
from tests.harness.poison import is_poisoned
from tests.harness.ranks import mesh_here, run_distributed

peft = pytest.importorskip("peft", reason="adapters need the 'peft' extra")

MESHES = [(2, {}), (4, {"dp_replicate": 2})]
# What each family is asked to train whole beside its adapters.
SAVED = {
    "gemma3": ["embed_tokens"],  # with a buffer that scales it
    "llama": ["lm_head", "embed_tokens"],
    "qwen2-tied": ["mlp"],  # a module of modules
    "gpt2": ["ln_f"],  # with a bias
}


def _lora(**overrides: Any) -> Any:
    return peft.LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "c_attn"], "task_type": "CAUSAL_LM", **overrides}
    )


def _oracle(folder: Path, **overrides: Any) -> Any:
    model = plain(folder)
    torch.manual_seed(3)
    return peft.get_peft_model(model, _lora(**overrides)).train()


def _check_copies(root: Path, mesh_shape: dict[str, int]) -> None:
    assert is_poisoned()
    for family, modules in SAVED.items():
        for shape in (mesh_shape, None):
            model = fs.add_adapters(
                fs.build_meta_model(root / family), _lora(modules_to_save=modules), seed=3
            )
            if shape is not None:
                fs.shard_model(model, mesh=mesh_here(**shape), mp_policy=FLOAT32)
            report = fs.load_weights(model, root / family)
            assert difference(model, _oracle(root / family, modules_to_save=modules)) == [], family
            for kind, part in (("copy", ".modules_to_save."), ("kept", "lora_")):
                found = [name for name, source in report.sources.items() if source == kind]
                assert found == [name for name, _ in _named(model) if part in name]


def _named(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


@pytest.mark.parametrize(("ranks", "mesh_shape"), MESHES)
def test_copies_have_all_of_what_they_are_copies_of(
    tmp_path: Path, ranks: int, mesh_shape: dict[str, int]
) -> None:
    for family in SAVED:
        save_tiny(tmp_path / family, family)
    run_distributed(_check_copies, ranks, tmp_path, mesh_shape)


def _check_unrounded(folder: Path) -> None:
    oracle = _oracle(folder, modules_to_save=["lm_head"])
    model = composed(folder, mesh=mesh_here(), peft_config=_lora(modules_to_save=["lm_head"]), adapter_seed=3)
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter), oracle.get_parameter(name).to(parameter.dtype)), name
        assert parameter.dtype == torch.float32 or not parameter.requires_grad
    assert model.get_parameter("base_model.model.model.norm.weight").dtype == torch.bfloat16


def test_copies_start_from_what_is_stored_and_not_from_that_rounded(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)  # in float32
    run_distributed(_check_unrounded, 2, tmp_path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: peft.get_peft_model(m, _lora()), "lora_A.*add_adapters"),
        (lambda m: peft.get_peft_model(m, _lora(use_dora=True)), "use_dora"),
        (
            lambda m: peft.get_peft_model(m, peft.IA3Config(task_type="CAUSAL_LM")),
            "ia3_l.*memory and values before",
        ),
        (
            lambda m: m.model.add_module("extra", torch.nn.Linear(4, 4, device="meta")) or m,
            "extra.weight.*memory and values before",
        ),
        (
            lambda m: m.model.register_buffer("table", torch.empty(3, device="meta"), persistent=False) or m,
            "table.*memory and values before",
        ),
    ],
    ids=["adapters", "DoRA", "IA3", "a module", "a buffer"],
)
def test_what_nothing_fills_is_refused_before_anything_is_read(make: Any, words: str, saved: Path) -> None:
    model = make(fs.build_meta_model(saved))
    with pytest.raises(fs.FsdpSftError, match=words):
        fs.load_weights(model, saved)
    assert all(tensor.is_meta for name, tensor in _named(model) if "lora_" not in name)


def test_a_head_of_another_size_than_the_config_says_is_not_initialised(saved: Path) -> None:
    model: Any = fs.build_meta_model(saved, architectures=["LlamaForSequenceClassification"], num_labels=9)
    model.score = torch.nn.Linear(model.config.hidden_size, 5, bias=False, device="meta")
    with pytest.raises(ValueError, match=r"other shapes than its config describes \(score\.weight\)"):
        fs.load_weights(model, saved, missing="initialise", unexpected="ignore")


def test_adapters_taken_from_other_base_weights_are_refused(saved: Path) -> None:
    for overrides in ({"use_dora": True}, {"init_lora_weights": "pissa"}, {"trainable_token_indices": [3]}):
        model = fs.add_adapters(plain(saved), _lora(**overrides))
        before = {name: tensor.clone() for name, tensor in _named(model)}
        with pytest.raises(fs.UnsupportedModelError, match="base model first"):
            fs.load_weights(model, saved)
        assert all(torch.equal(tensor, before[name]) for name, tensor in _named(model))


@pytest.mark.parametrize("saved", [{"family": "qwen2-tied"}], indirect=True)
def test_every_tensor_has_one_source(saved: Path) -> None:
    model = fs.build_meta_model(saved)
    model.register_buffer("own", torch.ones(2))
    sources = dict(fs.load_weights(model, saved).sources)
    assert list(sources) == [name for name, _ in _named(model)]
    others = {"lm_head.weight": "tie", "own": "kept", "model.rotary_emb.inv_freq": "computed"}
    assert {name: sources.pop(name) for name in others} == others
    del sources["model.rotary_emb.original_inv_freq"]
    assert {*sources.values()} == {"checkpoint"}

"""Layers that predict further tokens (MTP): exports have those of their base, or say that they have none."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import fsdp_sft as fs
from tests.harness.hf_folders import loaded, plain, rewrite, tensors_of
from tests.harness.models import ragged_batches
from tests.harness.quantised_folders import configure, quantise
from tests.harness.ranks import mesh_here, run_distributed

LATENT = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "q_lora_rank": 16, "kv_lora_rank": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "max_position_embeddings": 128,
}  # fmt: skip
LINEAR = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4,
    "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
NUMBERS = {"deepseek": "num_nextn_predict_layers", "qwen": "mtp_num_hidden_layers"}
KINDS = pytest.mark.parametrize("kind", list(NUMBERS))


@pytest.fixture
def base(kind: str, tmp_path: Path) -> Path:
    """A base in bfloat16 with one such layer: the third of DeepSeek's, and ``mtp.`` of Qwen's."""
    folder = tmp_path / "base"
    torch.manual_seed(0)
    if kind == "deepseek":
        tf.DeepseekV3ForCausalLM(
            tf.DeepseekV3Config(**LATENT, num_hidden_layers=3)
        ).bfloat16().save_pretrained(folder)
        own = {
            f"model.layers.2.{name}.weight": torch.rand(32).bfloat16()
            for name in ["enorm", "hnorm", "shared_head.norm"]
        }
        own["model.layers.2.eh_proj.weight"] = torch.randn(32, 64).bfloat16()
        own["model.layers.2.embed_tokens.weight"] = torch.randn(101, 32).bfloat16()
        own["model.layers.2.shared_head.head.weight"] = torch.randn(101, 32).bfloat16()
    else:
        tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**LINEAR)).bfloat16().save_pretrained(folder)
        own = {"mtp.fc.weight": torch.randn(32, 64).bfloat16(), "mtp.norm.weight": torch.rand(32)}
        own["mtp.layers.0.self_attn.q_proj.weight"] = torch.randn(64, 32).bfloat16()
    rewrite(folder, tensors_of(folder) | own, files=3)
    configure(folder, num_hidden_layers=2, **{NUMBERS[kind]: 1})
    return folder


def _further(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors_of(folder).items() if n.startswith(("mtp.", "model.layers.2."))}


def _number(folder: Path, kind: str) -> Any:
    return json.loads((folder / "config.json").read_text())[NUMBERS[kind]]


@pytest.fixture(autouse=True)
def as_deep_as_deepseek(monkeypatch: pytest.MonkeyPatch) -> None:
    _pass_over_the_third(monkeypatch)


def _pass_over_the_third(patch: pytest.MonkeyPatch) -> None:
    """As the class does with layer 61, which is the 62nd of the checkpoint."""
    patch.setattr(tf.DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])


def _train_and_export(root: Path, new_vocab_size: int | None) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _pass_over_the_third(patch)
        model = fs.load_pretrained(root / "base", mesh=mesh_here(), new_vocab_size=new_vocab_size)
        fs.train_step(model, ragged_batches(2), torch.optim.AdamW(model.parameters(), lr=1e-2))
        fs.export_hf(model, root / "out")
    return [str(one.message) for one in warned]


def _export(root: Path) -> Path:
    return fs.export_hf(loaded(root / "base"), root / "out")


@KINDS
def test_a_trained_model_keeps_them_byte_for_byte(kind: str, base: Path, tmp_path: Path) -> None:
    run_distributed(_train_and_export, 2, tmp_path, None)
    own, out = _further(base), _further(tmp_path / "out")
    assert own.keys() == out.keys() != set()
    for name, tensor in own.items():
        assert out[name].dtype == tensor.dtype
        assert torch.equal(out[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert _number(tmp_path / "out", kind) == 1
    assert not torch.equal(*(tensors_of(at)["lm_head.weight"] for at in (tmp_path / "out", base)))
    _, told = type(plain(tmp_path / "out")).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert (told["missing_keys"], told["unexpected_keys"]) == (set(), set())


@KINDS
@pytest.mark.usefixtures("base")
def test_a_changed_vocabulary(kind: str, tmp_path: Path) -> None:
    """DeepSeek's have an embedding of their own, of as many rows as the base's."""
    said = run_distributed(_train_and_export, 2, tmp_path, 128)[0]
    assert any("(MTP) are left out of the export: the model has another vocab_size" in s for s in said) == (
        kind == "deepseek"
    )
    assert (bool(_further(tmp_path / "out")), _number(tmp_path / "out", kind)) == (
        (False, 0) if kind == "deepseek" else (True, 1)
    )


@KINDS
def test_a_changed_depth(kind: str, base: Path, tmp_path: Path) -> None:
    """Of a model with fewer layers the base's further ones are not for further tokens."""
    fewer = {"layer_types": ["linear_attention"]} if kind == "qwen" else {}
    model: Any = fs.build_meta_model(base, num_hidden_layers=1, **fewer)
    fs.load_weights(model, base, unexpected="ignore")
    with pytest.warns(UserWarning, match=r"left out of the export: the model has another num_hidden_layers"):
        fs.export_hf(model, tmp_path / "out")
    assert not [name for name in tensors_of(tmp_path / "out") if "layers.1." in name or "mtp" in name]
    assert _number(tmp_path / "out", kind) == 0


@KINDS
def test_a_base_that_is_gone(kind: str, base: Path, tmp_path: Path) -> None:
    model = loaded(base)
    shutil.rmtree(base)
    with pytest.warns(UserWarning, match=r"left out of the export: the files of its base are not at hand"):
        fs.export_hf(model, tmp_path / "out")
    assert _number(tmp_path / "out", kind) == 0
    assert plain(tmp_path / "out").num_parameters()


def test_a_base_without_any(tmp_path: Path) -> None:
    tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**LATENT, num_hidden_layers=2)).save_pretrained(
        tmp_path / "base"
    )
    assert (_number(tmp_path / "base", "deepseek"), _number(_export(tmp_path), "deepseek")) == (1, 0)


@pytest.mark.parametrize("kind", ["deepseek"])
def test_of_a_quantised_base_their_values(base: Path, tmp_path: Path) -> None:
    (tmp_path / "values").mkdir()
    quantise(base, tmp_path / "values")
    values, out = _further(tmp_path / "values"), _further(_export(tmp_path))
    assert values.keys() == out.keys()
    assert all(torch.equal(out[name], tensor.bfloat16()) for name, tensor in values.items())
